"""Cloister's Python API: plans, simulations, and the parties of a deployment (docs/python.md).

A name is imported when it is used, so that `import cloister` costs nothing. No file of the package imports from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cloister.clients.embedded import Site as Site
    from cloister.clients.training import testing as testing
    from cloister.protocol import errors as errors
    from cloister.protocol.plan import plan as plan
    from cloister.protocol.plan.soundness import Plan as Plan
    from cloister.server.federation.embedded import Coordinator as Coordinator
    from cloister.simulations.planning import calibrate as calibrate
    from cloister.simulations.planning import epsilon as epsilon
    from cloister.simulations.run import Run as Run
    from cloister.simulations.run import ask as ask
    from cloister.simulations.run import simulate as simulate

_PLACES = {
    "Coordinator": "server.federation.embedded",
    "Plan": "protocol.plan.soundness",
    "Run": "simulations.run",
    "Site": "clients.embedded",
    "ask": "simulations.run",
    "calibrate": "simulations.planning",
    "epsilon": "simulations.planning",
    "errors": "protocol",
    "plan": "protocol.plan",
    "simulate": "simulations.run",
    "testing": "clients.training",
}
"""The module of each name; a module itself is a name of its package."""

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_PLACES[name]}")
    found = getattr(module, name, None) or import_module(f"{module.__name__}.{name}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
