"""Fork safety, tested with real forks, most of them in a fresh interpreter."""

import os
import signal
import subprocess
import sys
import textwrap

from interpreter import program
from pilotflame.runtime.calls.leftovers import fork_safety


def test_a_detached_child_ends_with_its_parent_and_has_a_new_session() -> None:
    """Kill a parent whose detached child waits. The end of their pipe shows that the child has ended, too."""
    text = """
        import os, signal, sys
        from pilotflame.runtime.calls.leftovers import fork_safety
        signal.signal(signal.SIGTERM, lambda *_: None)   # a parent's handlers are not the child's
        parent = os.getpid()
        if os.fork() == 0:
            fork_safety.detach(parent)
            print(os.getpid(), os.getsid(0), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
                  callable(signal.getsignal(signal.SIGINT)), flush=True)
            signal.pause()
        signal.pause()
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, session, default, handled = parent.stdout.readline().split()
        assert (session, default, handled) == (pid, "True", "True")
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == ""  # returns when the child has ended, too
        parent.wait()


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    pid = os.fork()
    if pid == 0:
        fork_safety.detach(1 if os.getppid() != 1 else 2)  # not the pid of the parent
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_torch_gets_its_threads_back() -> None:
    assert program("""
        import json, torch
        from pilotflame.runtime.calls.leftovers import fork_safety
        torch.set_num_threads(1)
        found = [fork_safety.torch_threads()]
        fork_safety.set_threads(3)
        print(json.dumps([*found, fork_safety.torch_threads()]))
    """) == [1, 3]


def test_without_torch_there_is_one_thread_and_none_is_loaded() -> None:
    assert program("""
        import json, sys
        from pilotflame.runtime.calls.leftovers import fork_safety
        fork_safety.set_threads(4); fork_safety.freeze_objects()
        print(json.dumps([fork_safety.torch_threads(), "torch" in sys.modules, "numpy" in sys.modules]))
    """) == [1, False, False]
