"""What control groups leave a process, as the files of both versions tell it."""

import pytest

from shardmath.transport.available import available_memory, control_group_memory

VERSION_2 = ("memory.max", "memory.current", "active_file", "inactive_file")
VERSION_1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_active_file",
    "total_inactive_file",
)
# lines of /proc/self/cgroup; folder: (limit, used, active file pages, inactive ones); what is left
CASES = {
    "none": ("0::/", {}, []),
    "no limit": ("0::/a", {"a": ("max", 7, 0, 0)}, []),
    "version 2": ("0::/a/b", {"a/b": (100, 30, 0, 0), "a": (50, 45, 0, 0)}, [70, 5]),
    "file pages": ("0::/a", {"a": (100, 90, 20, 30)}, [60]),
    "more file pages than used": ("0::/a", {"a": (100, 10, 20, 30)}, [100]),
    "over the limit": ("0::/a", {"a": (100, 130, 0, 0)}, [-30]),
    "a container's": ("0::/x/y", {"": (100, 30, 0, 0)}, [70]),
    "outside the container": ("0::/../../x", {"": (100, 30, 0, 0)}, [70]),
    "version 1": ("4:memory:/a\n1:cpu:/z", {"memory/a": (100, 30, 1, 2)}, [73]),
    "with others": ("4:cpu,memory:/a", {"memory/a": (100, 30, 0, 0)}, [70]),
    "version 1, container": ("4:memory:/docker/1", {"memory": (100, 30, 0, 0)}, [70]),
    "both": ("4:memory:/a\n0::/b", {"memory/a": (9, 1, 0, 0), "b": (8, 2, 0, 0)}, [8, 6]),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_left(case, tmp_path):
    told, folders, left = CASES[case]
    root = tmp_path / "cgroup"
    for name, (limit, used, *pages) in folders.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        files = VERSION_1 if name.startswith("memory") else VERSION_2
        (folder / files[0]).write_text(f"{limit}\n")
        (folder / files[1]).write_text(f"{used}\n")
        stat = "".join(f"{key} {value}\n" for key, value in zip(files[2:], pages, strict=True))
        (folder / "memory.stat").write_text(f"anon 5\n{stat}shmem 4\n")
    assert control_group_memory(told, str(root)) == left


def test_this_process_has_some():
    assert available_memory() > 1 << 20
