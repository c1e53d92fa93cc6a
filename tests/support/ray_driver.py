"""A driver of Ray as a team could have it: actors that make a process group and train, each in a process of its own.

    python ray_driver.py PLAN

PLAN is JSON: `init`, the arguments of `ray.init`, and `groups` of actors. Each group lists the `runtime_env` variables of its
actors, and says whether they make a process group. The outcomes of the groups are printed as one line of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

import ray


@ray.remote(num_cpus=0)
class Actor:
    """One rank."""

    def look(self) -> dict[str, Any]:
        """Return the process id, and whether the package is imported before the actor imports anything."""
        armed = "megacpp_overlays" in sys.modules
        return {"pid": os.getpid(), "armed": armed}

    def meet(self, rank: int, size: int, port: int) -> dict[str, Any]:
        """Import the target, make the group as a trainer does, and compare ranks."""
        import liger_kernel.ops.fused_linear_cross_entropy  # noqa: F401
        import torch.distributed

        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        import megacpp_overlays

        try:
            audit = megacpp_overlays.verify_ranks()
        except megacpp_overlays.RanksError as error:
            return {"error": str(error)}
        finally:
            torch.distributed.destroy_process_group()
        decisions = {each["id"]: each["decision"] for each in audit.as_dict()["decisions"]}
        return {"fingerprint": audit.fingerprint, "decision": decisions["liger-flce-none-backward"]}


def main() -> None:
    """Run the plan."""
    import megacpp_overlays

    plan = json.loads(sys.argv[1])
    children = megacpp_overlays.reach_children(receipts=True)
    handed = megacpp_overlays.child_environment()
    ray.init(log_to_driver=False, include_dashboard=False, **plan["init"])
    found = []
    for group in plan["groups"]:
        actors = [
            Actor.options(runtime_env={"env_vars": {**(handed if each.get("handed") else {}), **each["env"]}}).remote()
            if each["env"] or each.get("handed")
            else Actor.remote()
            for each in group["actors"]
        ]
        seen = ray.get([actor.look.remote() for actor in actors])
        outcome: dict[str, Any] = {"seen": seen}
        try:
            outcome["receipts"] = len(children.demand([each["pid"] for each in seen], timeout=group.get("timeout", 30)))
        except megacpp_overlays.ChildrenError as error:
            outcome["demand"] = str(error)
        if group.get("meets"):
            port = _free_port()
            outcome["met"] = ray.get([each.meet.remote(rank, len(actors), port) for rank, each in enumerate(actors)])
        found.append(outcome)
        for actor in actors:
            ray.kill(actor)
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    ray.shutdown()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
