"""Edits that break the repair of `triton-register-operands` in Triton of the lane `edge`."""

from __future__ import annotations

from edited_code import Case, appended, of_lane

from megacpp_overlays.feature_probes import triton_register_operands as feature

REPAIR = Case(
    feature,
    feature.TARGET.module,
    edits={
        "without waits": (
            "            print(ret)\n        return ret",
            "            print(ret)\n        return without_waits(ret)",
        ),
        "an older compiler": ("from triton._C.libtriton import", "from triton._C.older.libtriton import"),
        "the older assembler": ("    return knobs.nvidia.ptxas_blackwell", "    return knobs.nvidia.ptxas"),
        "registers of the assembler": ("reg_alloc = ['--regAllocOptLevel=2']", "reg_alloc = []"),
        "pipelined again": (
            "            passes.ttgpuir.add_schedule_loops(pm)\n            passes.ttgpuir.add_pipeline(pm, opt.num_stages, dump_enabled)",
            "            passes.ttgpuir.add_schedule_loops(pm)\n            passes.ttgpuir.add_pipeline(pm, opt.num_stages, dump_enabled)\n            ours.passes.without_waits(pm)",
        ),
        "assembled elsewhere": appended("CUDABackend.make_cubin = make_cubin_of_3_6"),
        "a method on top": ("class CUDABackend(BaseBackend):", "class CUDABackend(OlderBackend):"),
    },
    tree=of_lane("edge"),
)
