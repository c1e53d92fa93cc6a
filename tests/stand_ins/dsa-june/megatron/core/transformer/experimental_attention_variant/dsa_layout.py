"""Stand-in for dsa_layout of main in June 2026: same names, signatures and behaviour, none of its code."""

import torch


def get_cp_positions_from_layout(sq, skv, cp_size, cp_rank, cp_comm_type, device, cp_group=None):
    """Return the positions of this rank's queries, a chunk from the front and its mirror, and of all keys."""
    keys = torch.arange(skv, device=device, dtype=torch.int64)
    if cp_size == 1:
        return torch.arange(sq, device=device, dtype=torch.int64), keys
    if cp_comm_type != "allgather":
        raise NotImplementedError(cp_comm_type)
    chunks = torch.arange(skv, device=device, dtype=torch.int64).view(2 * cp_size, -1)
    return torch.cat((chunks[cp_rank], chunks[-1 - cp_rank])), keys


def extract_query_positions_from_position_ids(position_ids, sq, device):
    """Return the positions of one row if there are as many as queries."""
    if position_ids is None:
        return None
    if position_ids.ndim not in (1, 2):
        raise ValueError(f"{position_ids.ndim} axes")
    row = position_ids
    if position_ids.ndim == 2:
        if position_ids.size(0) > 1:
            assert torch.equal(position_ids[0], position_ids[-1]), "rows differ"
        row = position_ids[0]
    return row.to(dtype=torch.int64, device=device) if row.numel() == sq else None
