"""What `cloister site check` says of a site's devices: what each rank will hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from rich.console import Console

from cloister.cli.show.console import columns
from cloister.clients.checks.doctor import site_bytes
from cloister.clients.checks.memory_estimate import RankMemory, estimated_memory
from cloister.clients.ranks.device_mesh import is_here, memory_of, mesh_for
from cloister.lm.parallel.mesh import Mesh
from cloister.protocol.errors import ModelError
from cloister.protocol.machine.prerequisites import size
from cloister.protocol.plan.plan import MeshSection, Plan

ABSENT = 4
"""Exit code where the mesh suits the plan, but its devices are absent."""
_KINDS = 3
"""Kinds of rank that are beside each other in 80 columns."""
_WORDS = {
    "parameters": "parameters held",
    "weights_bytes": "weights",
    "gradients_bytes": "gradients",
    "moments_bytes": "moments of the optimizer",
    "sums_bytes": "sum of clipped gradients",
    "gathered_bytes": "largest block gathered at a time",
    "update_bytes": "update",
    "coded_bytes": "coded update",
    "needed_bytes": "needed, without activations",
    "memory_bytes": "memory of the device",
}


@dataclass(frozen=True)
class Devices:
    """The devices of a site, and what they will hold."""

    plan: Plan
    mesh: Mesh
    names: list[str]
    """The device of each rank."""
    ranks: list[RankMemory]

    @classmethod
    def of(cls, plan: Plan, section: MeshSection, device: str) -> Devices:
        """The devices on which a site trains a plan; they may be those of another machine.

        Args:
            plan: The plan.
            section: The site's `[mesh]`.
            device: The site's `device`.

        Raises:
            ModelError: the mesh does not fit the model.
        """
        mesh, names = mesh_for(plan, section, device, elsewhere=True)
        return cls(plan, mesh, names, estimated_memory(plan, mesh))

    @property
    def absent(self) -> list[str]:
        """The devices that this machine does not have."""
        return [name for name in self.names if not is_here(name)]

    def check_memory(self) -> None:
        """Check that what the ranks hold fits into the memory of those devices that are here.

        Raises:
            ModelError: it does not.
        """
        for name in dict.fromkeys(self.names):
            here = [each for each, on in zip(self.ranks, self.names, strict=True) if on == name]
            needed = sum(each.needed(name) for each in here)
            if is_here(name) and needed > memory_of(name):
                raise ModelError(
                    "mesh",
                    self.mesh.degrees(),
                    expected=f"ranks that hold at most the {size(memory_of(name))} of {name}, but those on it need "
                    f"{size(needed)} without activations",
                    fix="raise mesh.shard, train an adapter, or check for GPUs of another machine with --device cuda",
                )

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The figures of each rank; the memory of a device that is absent is None."""
        rows = []
        for rank, (name, memory) in enumerate(zip(self.names, self.ranks, strict=True)):
            sizes = {
                key if key == "parameters" else f"{key}_bytes": of for key, of in asdict(memory.part).items()
            }
            place = {"rank": rank, "device": name, "coordinates": self.mesh.coordinates(rank)._asdict()}
            span = {"span": [memory.span.start, memory.span.stop]}
            sent = {"update_bytes": memory.update, "coded_bytes": memory.coded}
            has = memory_of(name) if is_here(name) else None
            rows.append(
                place | sizes | span | sent | {"needed_bytes": memory.needed(name), "memory_bytes": has}
            )
        return rows

    def as_json(self) -> dict[str, object]:
        """All figures, those of each rank apart."""
        on_disk = site_bytes(self.plan)
        return {"mesh": asdict(self.mesh), "absent": self.absent, "state_bytes": on_disk, "ranks": self.rows}

    def show(self, console: Console) -> None:
        """Print what the ranks will hold; ranks with equal parts share a column, which has the largest of each."""
        console.print(f"Mesh: {self.mesh.degrees()}", highlight=False)
        on_disk = size(site_bytes(self.plan))
        console.print(f"State folder: {on_disk} on disk, besides the data", highlight=False)
        kinds: dict[tuple[object, ...], list[dict[str, Any]]] = {}
        for memory, row in zip(self.ranks, self.rows, strict=True):
            kinds.setdefault((memory.part, row["memory_bytes"]), []).append(row)
        left = iter(kinds.values())
        while some := list(islice(left, _KINDS)):
            table = columns(*[""] * (1 + len(some)))
            table.add_row("ranks", *(_runs([row["rank"] for row in kind]) for kind in some))
            table.add_row("device", *(kind[0]["device"].partition(":")[0] for kind in some))
            for key, words in _WORDS.items():
                table.add_row(words, *(_shown(key, [row[key] for row in kind]) for kind in some))
            console.print(table)


def _shown(key: str, values: Sequence[int | None]) -> str:
    largest = max((value for value in values if value is not None), default=None)
    if largest is None:
        return "absent"
    return size(largest) if key.endswith("_bytes") else f"{largest:,}"


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers in words, such as `0 to 8: 5`."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}: {len(numbers)}"
