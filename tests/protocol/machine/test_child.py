"""A child process ends with its parent, also where its interpreter never finishes shutting down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HANGS = """
import signal, threading
lock = threading.Lock()
class Channel:
    def __del__(self):  # as gRPC's does, where a thread that has stopped holds its lock
        lock.acquire()
def script():
    global channel
    lock.acquire()
    channel = Channel()
    print("started", flush=True)
    {waits}
"""
ENDS = """
import sys, hangs
from cloister.protocol.machine import child
child.END_S = 1
sys.argv = ["child", "hangs"]
child.main()
"""


WAITS = "signal.signal(signal.SIGTERM, signal.SIG_IGN); threading.Event().wait()"


@pytest.mark.parametrize(
    ("script", "orphaned"),
    [(HANGS.format(waits=""), False), (HANGS.format(waits=WAITS), True)],
    ids=["by itself", "with its parent"],
)
def test_a_child_ends_whose_interpreter_does_not(tmp_path: Path, script: str, orphaned: bool) -> None:
    """Another process would wait for what this one holds."""
    about = tmp_path / "hangs-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hangs\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[console_scripts]\nhangs = hangs:script\n")
    (tmp_path / "hangs.py").write_text(script)
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r})\n{ENDS}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "started\n"
        if orphaned:
            process.stdin.close()
        assert process.wait(30) < 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
