"""Runs first in new namespaces: leaves the host's files behind, gives up all rights, and lets a child go on.

It is started with `python -c` and the text of this file, followed by that of inner_run.py, as process 1 of a PID
namespace and with all capabilities over the new namespaces only. Its arguments after those of inner_run.py are the
bytes of the scratch folder and the folders to show. Names of the C library and numbers are those of man 2 mount,
mount_setattr, pivot_root, prctl and capset.
"""

import ctypes
import os
import sys

_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MNT_DETACH = 2, 4, 4096, 16384, 2
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _AT_RECURSIVE, _SYS_MOUNT_SETATTR, _AT_FDCWD = 1, 2, 0x8000, 442, -100
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 4, 24, 38, 47, 4
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_TREE = "/sys"  # exists on every Linux and holds nothing that the sandbox shows
_ROOT = f"{_TREE}/root"

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """Calls a function of the C library. Raises OSError if it fails."""
    encoded = [argument.encode() if isinstance(argument, str) else argument for argument in arguments]
    if getattr(libc, name)(*encoded):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")


def tmpfs(path: str, size_bytes: int, num_files: int, mode: str) -> None:
    """Mounts an empty folder in memory."""
    call(
        "mount", "tmpfs", path, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size_bytes},nr_inodes={num_files},mode={mode}"
    )


def show(path: str) -> None:
    """Makes a file or folder of the host, or what its symbolic link says, visible under the same path."""
    target = f"{_ROOT}{path}"
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    call("mount", path, target, None, _MS_BIND | _MS_REC, None)


def leave_the_host(scratch_bytes: int, paths: list[str]) -> None:
    """Replaces all mounts by a tree that shows `paths` read-only and has /tmp to write to."""
    tmpfs(_TREE, 1 << 20, 256, "0755")
    for path in paths:
        show(path)
    os.mkdir(f"{_ROOT}/tmp")
    os.symlink("/tmp", f"{_ROOT}/dev/shm")
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, _TREE, _AT_RECURSIVE, attributes, size)
    tmpfs(f"{_ROOT}/tmp", scratch_bytes, 4096, "1777")
    os.chdir(_TREE)
    call("pivot_root", ".", ".")
    call("umount2", ".", _MNT_DETACH)
    # The kernel refuses new user namespaces, in which the code would have rights again, to a process in a chroot.
    os.chroot("/root")
    os.chdir("/tmp")


def give_up_all_rights() -> None:
    """Drops every capability for good."""
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    number = 0
    while libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:  # fails at the first that this kernel does not have
        number += 1
    call("capset", (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)  # nobody may trace this process


call("sethostname", "sandbox", len("sandbox"))
leave_the_host(int(sys.argv[6]), sys.argv[7:])
give_up_all_rights()
child = os.fork()
while child:
    # Orphans of the sandbox become children of this process. When it ends, the kernel kills all that are left.
    ended, status = os.wait()
    if ended == child:
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
