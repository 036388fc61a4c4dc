"""The fork server of a simulation's workers: what it imports, and when it starts.

Its imports take as long as those of the coordinator. The command line starts it before its own, so that both import at
the same time; a pool of workers starts it if it does not run.
"""

from __future__ import annotations

from importlib.util import find_spec

from cloister.protocol.machine.fork_server import running
from cloister.protocol.plan.plan import MeshSection, Plan
from cloister.simulations.engines.process import environment


def start(plan: Plan) -> None:
    """Start the fork server for the sites of a plan and do not wait for its imports; none is started if one runs.

    Raises:
        EngineError: it cannot be started.
    """
    with environment(variables(plan)), running(modules(plan)):
        pass


def modules(plan: Plan) -> list[str]:
    """The modules that a worker of a plan's sites needs and that take long to import.

    None of them may look for a GPU: the processes that are forked after that cannot use one. PEFT imports bitsandbytes
    where it is installed, which does.
    """
    apart = plan.model.adapter.scheme == "full" or find_spec("bitsandbytes") is not None
    adapted = [] if apart else ["peft"]
    # By `lm.model.model.load_model`.
    loading = ["transformers.modeling_utils", "transformers.modeling_layers"]
    divided = any(profile.mesh != MeshSection() for profile in plan.simulation.profiles)
    ranks = ["cloister.clients.ranks.team"] if divided else []
    return ["cloister.simulations.federation", *loading, *adapted, *ranks]


def variables(plan: Plan) -> dict[str, str]:
    """The environment variables of all workers of a plan's sites; libraries read them when they are imported."""
    threads = str(plan.local.threads)
    return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}
