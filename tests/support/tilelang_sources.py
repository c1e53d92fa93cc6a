"""CUDA source as TileLang generates it for sums, shortened: one thread's part first, then the threads' results."""

ADDED_TOO_OFTEN = """
extern "C" __global__ void main_kernel(float* __restrict__ out, const float* __restrict__ values) {
  float rows[3];
  float sums[3];
  for (int i = 0; i < 3; ++i) {
    rows[i] = values[((i * 128) + ((int)threadIdx.x))];
  }
  for (int i_1 = 0; i_1 < 3; ++i_1) {
    sums[i_1] = 0x0p+0f/*0.000000e+00*/;
    #pragma unroll
    for (int rv = 0; rv < 32; ++rv) {
      sums[i_1] = (sums[i_1] + rows[i_1]);
    }
    sums[i_1] = tl::AllReduce<tl::SumOp, 32, 1, 0, tl::NamedBarrier<128>>::run(sums[i_1]);
  }
}
"""
"""(2, 192) in groups of 32: 32 additions of a thread, 32 threads."""

RIGHT = ADDED_TOO_OFTEN.replace("rv < 32", "rv < 1")

TWO_SUMS = """
extern "C" __global__ void main_kernel() {
  for (int chunk = 0; chunk < 4; ++chunk) {
    for (int i_1 = 0; i_1 < 2; ++i_1) {
      first[i_1] = 0x0p+0f/*0.000000e+00*/;
      for (int rv = 0; rv < 8; ++rv) {
        first[i_1] = (first[i_1] + product[((((rv & 3) * 4) + (i_1 * 2)) + (rv >> 2))]);
      }
      first[i_1] = tl::AllReduce<tl::SumOp, 256, 128, 0, tl::NamedBarrier<256>>::run(first[i_1], (&(shared[0])));
      first[i_1] = tl::AllReduce<tl::SumOp, 16, 4, 0, tl::NamedBarrier<256>>::run(first[i_1]);
      first[i_1] = tl::AllReduce<tl::SumOp, 4, 1, 0, tl::NamedBarrier<256>>::run(first[i_1]);
    }
    second[0] = 0x0p+0f/*0.000000e+00*/;
    second[0] = (second[0] + left[0]);
    second[0] = (second[0] + left[1]);
    second[0] = tl::AllReduce<tl::SumOp, 64, 4, 0, tl::NamedBarrier<256>>::run(second[0]);
    alone[0] = 0x0p+0f/*0.000000e+00*/;
    for (int r = 0; r < 4; ++r) {
      alone[0] = (alone[0] + left[r]);
    }
  }
}
"""
"""A sum over three groups of threads, one without a loop, and one that a thread has to itself."""
