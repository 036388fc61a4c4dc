"""What `cloister site check` says of a site's devices: what each rank will hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice

from rich.console import Console

from cloister.cli.show.console import columns
from cloister.cli.verbs.plan import size
from cloister.clients.checks.memory_estimate import RankMemory, estimated_memory
from cloister.clients.ranks.device_mesh import is_here, memory_of, mesh_for
from cloister.lm.parallel.mesh import Mesh
from cloister.protocol.errors import ModelError
from cloister.protocol.plan.plan import MeshSection, Plan

ABSENT = 4
"""Exit code where the mesh suits the plan, but its devices are absent."""
_KINDS = 3
"""Kinds of rank that are beside each other in 80 columns."""


@dataclass(frozen=True)
class Devices:
    """The devices of a site, and what they will hold."""

    plan: Plan
    section: MeshSection
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
        return cls(plan, section, mesh, names, estimated_memory(plan, mesh))

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

    def as_json(self) -> dict[str, object]:
        """All figures, those of each rank apart; null where the device is absent."""
        listed = []
        for rank, (name, memory) in enumerate(zip(self.names, self.ranks, strict=True)):
            sizes = {
                f"{key}_bytes": value for key, value in asdict(memory.part).items() if key != "parameters"
            }
            listed.append(
                {
                    "rank": rank,
                    "device": name,
                    "coordinates": self._place(rank),
                    "parameters": memory.part.parameters,
                    **sizes,
                    "span": [memory.span.start, memory.span.stop],
                    "update_bytes": memory.update,
                    "coded_bytes": memory.coded,
                    "needed_bytes": memory.needed(name),
                    "memory_bytes": memory_of(name) if is_here(name) else None,
                }
            )
        return {
            "mesh": {field.name: getattr(self.mesh, field.name) for field in fields(self.mesh)},
            "absent": self.absent,
            "state_bytes": self._on_disk(),
            "ranks": listed,
        }

    def show(self, console: Console) -> None:
        """Print what the ranks will hold; ranks that hold equally much share a column."""

        console.print(f"Mesh: {self.mesh.degrees()}", highlight=False)
        console.print(f"State folder: {size(self._on_disk())} on disk, besides the data", highlight=False)
        kinds = iter(self._kinds())
        while some := list(islice(kinds, _KINDS)):
            table = columns(*[""] * (1 + len(some)))
            for title, *cells in zip(*(self._column(ranks) for ranks in some), strict=True):
                table.add_row(title[0], title[1], *(value for _, value in cells))
            console.print(table)

    def _on_disk(self) -> int:
        """Bytes of the site's state folder."""
        from cloister.clients.checks.doctor import site_bytes

        return site_bytes(self.plan)

    def _kinds(self) -> list[list[int]]:
        """The ranks, those with equal parts of the model together."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for rank, (memory, name) in enumerate(zip(self.ranks, self.names, strict=True)):
            kinds.setdefault((memory.part, memory_of(name) if is_here(name) else None), []).append(rank)
        return list(kinds.values())

    def _column(self, ranks: list[int]) -> Iterator[tuple[str, str]]:
        """Titles and values of ranks with equal parts; their spans may differ by a block, and the longest is shown."""
        name, part = self.names[ranks[0]], self.ranks[ranks[0]].part
        largest = max((self.ranks[rank] for rank in ranks), key=lambda each: each.span.size)
        names = [each.removeprefix("cuda:") for each in dict.fromkeys(self.names[rank] for rank in ranks)]
        yield "ranks", _runs(ranks)
        yield "device", name if name == "cpu" else f"cuda:{_runs(sorted(map(int, names)))}"
        for field, degree in _degrees(self.mesh).items():
            yield f"{field} (of {degree})", _runs(sorted({self._place(rank)[field] for rank in ranks}))
        yield "parameters held", f"{part.parameters:,}"
        yield "weights", size(part.weights)
        yield "gradients", size(part.gradients)
        yield "moments of the optimizer", size(part.moments)
        if self.plan.privacy.dpsgd:
            yield "sum of clipped gradients", size(part.sums)
        yield "largest block gathered at a time", size(part.gathered)
        yield "span of the update, elements", f"{largest.span.size:,}"
        yield "update", size(largest.update)
        yield "coded update", size(largest.coded)
        yield "needed, without activations", size(largest.needed(name))
        if name == "cpu":
            yield "memory of the machine", size(memory_of(name))
        else:
            yield "memory of the device", size(memory_of(name)) if is_here(name) else "absent"

    def _place(self, rank: int) -> Mapping[str, int]:
        return self.mesh.coordinates(rank)._asdict()


def _degrees(mesh: Mesh) -> dict[str, int]:
    """The degrees above 1."""
    found = {field.name: int(getattr(mesh, field.name)) for field in fields(mesh)}
    return {name: degree for name, degree in found.items() if degree > 1}


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers in words, such as `0-3, 8`."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1][1:] = [number]
        else:
            found.append([number])
    return ", ".join("-".join(map(str, run)) for run in found)
