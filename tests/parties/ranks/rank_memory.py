"""A model that does not fit into the memory of one rank, trained by one rank and by two; run by `test_team.py`.

Each rank has its weights when its memory is limited, and may take 12 bytes more for each parameter of the whole model.
One rank needs 16: two moments, the update, and the coded update.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
from pathlib import Path

from cloister.clients.ranks.resident import Resident
from cloister.protocol.errors import ModelError, RankError
from cloister.protocol.plan.plan import MeshSection
from cloister.tests.clients.test_site import Attack
from cloister.tests.parties.federation import Federation, tiny, whole

SIZES = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}


def data_of(process: int) -> int:
    """Bytes of a process's private memory that may be written, which RLIMIT_DATA bounds."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))


def train(folder: Path, mesh: MeshSection) -> str:
    """What becomes of a contribution."""
    federation = Federation(folder, tiny(*(f"model.config.{name}={size}" for name, size in SIZES.items())))
    parameters, resident = federation.layout.size, Resident()
    assert parameters > 8e6
    attack = Attack(federation)
    site = attack.sites[0] = federation.site(0, mesh=mesh, resident=resident)
    inbox = attack.deal()[site.name]
    site.held_out(federation.plan, federation.model)  # which starts the ranks
    for rank in multiprocessing.active_children():
        assert rank.pid is not None
        most = data_of(rank.pid) + 12 * parameters
        resource.prlimit(rank.pid, resource.RLIMIT_DATA, (most, most))
    try:
        contribution = attack.contribute(site, inbox)
    except (RankError, ModelError) as error:
        return "cannot allocate memory" if "allocate memory" in str(error) else str(error)
    finally:
        resident.close()
    assert whole(contribution).size > parameters
    return "released"


if __name__ == "__main__":
    print("1 rank:", train(Path(sys.argv[1]) / "one", MeshSection(checkpointing=True)))
    print("2 ranks:", train(Path(sys.argv[1]) / "two", MeshSection(shard=2, checkpointing=True)))
