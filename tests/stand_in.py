"""A process that launchers start in place of a Python: a loaded process runs the program for it.

`python -IS stand_in.py ADDRESS PROGRAM ...` hands its words, environment, folder and descriptors to
the process of `preloaded.py` that listens at ADDRESS, passes on the signals that it gets, and ends
as the program does. It imports nothing that takes time.
"""

import marshal
import os
import signal
import socket
import sys

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def open_descriptors() -> list[int]:
    """Those that a program which is started now would inherit."""
    numbers = []
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  (pathlib takes long)
        try:
            if os.get_inheritable(number):
                numbers.append(number)
        except OSError:
            continue  # the listing's own
    return numbers


def main(address: str, *words: str) -> int:
    """The status of the program, or the negative number of the signal that ended it."""
    numbers = open_descriptors()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect("\0" + address)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a request comes before all signals
        request = marshal.dumps((words, dict(os.environ), os.getcwd(), numbers))  # noqa: PTH109
        socket.send_fds(channel, [request], numbers)
        for number in numbers:
            if number > 2:
                os.close(number)  # whoever is at the other side hears when the program does so
        for signum in SIGNALS:
            signal.signal(signum, lambda number, _: channel.send(b"%d" % number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return int(channel.recv(16) or -signal.SIGKILL)


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    if status < 0:
        if -status in SIGNALS:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)
