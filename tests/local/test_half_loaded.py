"""A library of transforms that one thread is loading is not taken for loaded by another."""

import sys
import threading

from shardmath.local import fft

# As an extension does, it lists its inner modules while it is loaded.
SLOW = """
import sys, types
sys.modules[__name__ + ".first"] = types.ModuleType(__name__ + ".first")
sys.slow_library_waits()
sys.modules[__name__ + ".second"] = types.ModuleType(__name__ + ".second")
"""


def test_another_thread_waits_for_all_of_it(tmp_path, monkeypatch):
    (tmp_path / "slow_library.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    begun, go_on, found = threading.Event(), threading.Event(), []

    def waits():
        begun.set()
        go_on.wait()

    def load():
        fft._loaded("slow_library.first")
        found.append("slow_library.second" in sys.modules)

    monkeypatch.setattr(sys, "slow_library_waits", waits, raising=False)
    one, two = threading.Thread(target=load), threading.Thread(target=load)
    one.start()
    begun.wait()
    two.start()
    two.join(0.2)  # ends at once where it does not wait for the first
    go_on.set()
    one.join()
    two.join()
    for name in ("slow_library", "slow_library.first", "slow_library.second"):
        sys.modules.pop(name, None)
    assert found == [True, True]
