"""Runs that several tests audit, and streams of noise that are the same in every run of a test."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cloister.privacy.mechanism.noise import NoiseStream
from cloister.simulations.audit.audit import audit
from cloister.tests.simulations.audit.audited import CENTRAL, OFTEN, QUIET, RECORD, SITE, folder_of


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("record"), RECORD)


@pytest.fixture(scope="module")
def often(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("often"), RECORD, overrides=OFTEN)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("site"), SITE, overrides=QUIET)


@pytest.fixture(scope="module")
def central(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory.mktemp("central"), SITE, overrides=(*QUIET, *CENTRAL))


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every stream that is asked for is another one, and the same in every run of a test."""
    # Not declared, so that they are used as secret ones are.
    streams = (NoiseStream(NoiseStream.from_declared_seed(seed).key) for seed in itertools.count())
    repeatable = functools.partial(audit, streams=lambda: next(streams))
    monkeypatch.setattr("cloister.simulations.audit.audit.audit", repeatable)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
