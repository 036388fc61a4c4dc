"""The directions in which the packages may import each other (docs/architecture.md), and who may know Flower."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Each package may import those named for it, and itself.
ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "privacy": {"protocol"},
    "lm": {"protocol"},
    "aggregation": {"protocol", "privacy", "lm"},
    "clients": {"protocol", "aggregation", "privacy", "lm"},
    "server": {"protocol", "aggregation", "privacy", "lm"},
    "simulations": {"protocol", "aggregation", "privacy", "lm", "clients", "server"},
    "cli": {"protocol", "aggregation", "privacy", "lm", "clients", "server", "simulations"},
}
KNOWS_FLOWER = {
    "clients/app.py",
    "clients/flower.py",
    "server/door/carrier.py",
    "server/door/grid.py",
    "server/federation/app.py",
    "server/federation/flower.py",
    "simulations/federation.py",
    "simulations/engines/flower.py",
    "simulations/engines/grid.py",
    "simulations/engines/ray_workers.py",
    "simulations/engines/segments.py",
    "simulations/site_losses.py",
    "simulations/engines/workers.py",
}
"""The carriers over Flower. No other file imports it."""
KNOWS_GRPC = {
    "clients/network/door.py",
    "server/door/door.py",
}
"""The two ends of the door. No other file imports gRPC."""


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def modules() -> list[Path]:
    return [path for package in ALLOWED for path in sorted((ROOT / package).rglob("*.py"))]


def wrong_imports(file: str, names: set[str]) -> set[str]:
    package = file.split("/")[0]
    own = {name.split(".")[1] for name in names if name.startswith("cloister.")}
    wrong = {f"cloister.{name}" for name in own - ALLOWED[package] - {package}}
    for carrier, known in (("flwr", KNOWS_FLOWER), ("grpc", KNOWS_GRPC), ("grpc_health", KNOWS_GRPC)):
        if file not in known:
            wrong |= {name for name in names if name.split(".")[0] == carrier}
    return wrong


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_architecture(path: Path) -> None:
    assert not wrong_imports(path.relative_to(ROOT).as_posix(), imported(path))


@pytest.mark.slow
def test_no_file_imports_in_a_circle() -> None:
    names = {path: "cloister." + ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules()}
    graph = {names[path]: imported(path) & set(names.values()) for path in names}
    assert list(TopologicalSorter(graph).static_order())
    looped = {**graph, "cloister.protocol.errors": {"cloister.cli.main"}}
    with pytest.raises(CycleError):
        list(TopologicalSorter(looped).static_order())


def room(name: str) -> str:
    """The room of a module: its folder, or its package where it lies in none."""
    return name.rpartition(".")[0]


def test_no_room_imports_in_a_circle() -> None:
    names = {path: "cloister." + ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in modules()}
    known = set(names.values())
    graph: dict[str, set[str]] = {}
    for path, name in names.items():
        found = {room(other) for other in imported(path) & known} - {room(name)}
        graph[room(name)] = graph.get(room(name), set()) | found
    assert len(list(TopologicalSorter(graph).static_order())) > 30
    graph["cloister.protocol.plan"] = {"cloister.server.round"}
    with pytest.raises(CycleError):
        list(TopologicalSorter(graph).static_order())


def test_no_folder_has_more_than_13_files() -> None:
    folders = {path.parent for package in [*ALLOWED, "tests"] for path in (ROOT / package).rglob("*.py")}
    many = {folder.relative_to(ROOT).as_posix(): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder for folder, files in many.items() if files > 13} == {"cli/verbs"}


def test_every_package_is_covered() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(ALLOWED)


def test_the_check_finds_a_wrong_import() -> None:
    assert wrong_imports("clients/site.py", {"cloister.server.round.round"}) == {"cloister.server"}
    assert wrong_imports("server/round/round.py", {"flwr.serverapp"}) == {"flwr.serverapp"}
    assert wrong_imports("server/federation/app.py", {"grpc"}) == {"grpc"}
    assert wrong_imports("server/door/door.py", {"grpc.aio", "flwr.serverapp"}) == {"flwr.serverapp"}
    assert wrong_imports("protocol/plan/plan.py", {"cloister.aggregation.secure.graph"}) == {
        "cloister.aggregation"
    }
    assert wrong_imports("privacy/accounting/terms.py", {"cloister.aggregation.secure.graph"}) == {
        "cloister.aggregation"
    }
    assert not wrong_imports("server/federation/app.py", {"flwr.serverapp", "cloister.protocol.plan.plan"})


@pytest.mark.parametrize(("carrier", "known"), [("flwr", KNOWS_FLOWER), ("grpc", KNOWS_GRPC)])
def test_what_may_know_a_carrier_exists_and_does(carrier: str, known: set[str]) -> None:
    for file in known:
        assert any(name.split(".")[0] == carrier for name in imported(ROOT / file)), file


def at_import(path: Path) -> set[str]:
    """The modules that importing a file imports: not those of its functions, nor those for types alone."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    names: set[str] = set()
    while body:
        node = body.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not for_types(node):
            body += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return names


def for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def drags_in(package: str, *starts: str) -> set[str]:
    """Of a package, what importing some modules imports, by way of other modules too."""
    paths = {"cloister." + ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules()}
    seen, left = set(starts), list(starts)
    while left:
        names = at_import(paths[left.pop()]) - seen
        seen |= names
        left += [name for name in names if name in paths]
    return {name for name in seen if name.split(".")[0] == package}


def test_training_code_runs_without_flower() -> None:
    """Importing a site's own code must not drag Flower in by way of another module."""
    assert not drags_in("flwr", "cloister.clients.site", "cloister.server.run")
    assert "flwr.serverapp" in drags_in("flwr", "cloister.server.federation.deployed"), (
        "by way of server/federation/app.py"
    )
    assert "torch" in drags_in("torch", "cloister.clients.site")
