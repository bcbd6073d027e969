"""Runs in the sandbox: limits this process, filters its system calls, reads code from standard input and runs it.

It is started with `python -c` and the text of this file, so it imports nothing but the standard library. Its arguments
are numbers: bytes of memory, seconds of CPU time, processes that the code may start (-1: as many as the user may have),
bytes of a file, and whether to filter system calls (1 or 0). Two more make this file build the sandbox first: the bytes
of the scratch folder, and the folders to show. It is then process 1 of a PID namespace, with all capabilities over the
new namespaces only, and leaves the host's files behind, gives up all rights, and continues in a child.

The filter is a seccomp filter, a program of classic BPF (man 2 seccomp) that every later process and thread inherits.
It refuses, with EPERM, the calls that no namespace separates and no limit counts. Calls newer than Linux 6.1
do not exist for the code (ENOSYS), so that a new kernel opens nothing. A program of another architecture is killed,
because its calls have other numbers. Names of the C library and numbers of the mounts are as in man 2 mount,
mount_setattr, pivot_root, prctl and capset.
"""

import builtins
import ctypes
import errno
import os
import resource
import struct
import sys

_REFUSED = {  # name, number on x86-64, number on aarch64; "-" where an architecture lacks the call
    "memory that no limit counts": """
        memfd_create 319 279  memfd_secret 447 447  shmget 29 194  shmat 30 196  shmctl 31 195  shmdt 67 197
        msgget 68 186  msgsnd 69 189  msgrcv 70 188  msgctl 71 187  semget 64 190  semop 65 193  semctl 66 191
        semtimedop 220 192  mq_open 240 180  mq_unlink 241 181  mq_timedsend 242 182  mq_timedreceive 243 183
        mq_notify 244 184  mq_getsetattr 245 185  splice 275 76  vmsplice 278 75  tee 276 77
        setxattr 188 5  lsetxattr 189 6  fsetxattr 190 7""",
    "what processes of a user or of the host share": """
        add_key 248 217  request_key 249 218  keyctl 250 219  io_setup 206 0  io_destroy 207 1  io_getevents 208 4
        io_pgetevents 333 292  io_submit 209 2  io_cancel 210 3  inotify_init 253 -  inotify_init1 294 26
        inotify_add_watch 254 27  fanotify_init 300 262  fanotify_mark 301 263""",
    "other processes": """
        ptrace 101 117  process_vm_readv 310 270  process_vm_writev 311 271  process_madvise 440 440
        process_mrelease 448 448  pidfd_getfd 438 438  kcmp 312 272""",
    "mounts and namespaces": """
        mount 165 40  umount2 166 39  pivot_root 155 41  chroot 161 51  unshare 272 97  setns 308 268
        open_tree 428 428  move_mount 429 429  fsopen 430 430  fsconfig 431 431  fsmount 432 432  fspick 433 433
        mount_setattr 442 442  name_to_handle_at 303 264  open_by_handle_at 304 265""",
    "interfaces that the code does not need": """
        bpf 321 280  perf_event_open 298 241  userfaultfd 323 282  io_uring_setup 425 425  io_uring_enter 426 426
        io_uring_register 427 427  seccomp 317 277  landlock_create_ruleset 444 444  landlock_add_rule 445 445
        landlock_restrict_self 446 446  personality 135 92  modify_ldt 154 -  lookup_dcookie 212 18  uselib 134 -
        sysfs 139 -  ustat 136 -  _sysctl 156 -  nfsservctl 180 42  quotactl 179 60  quotactl_fd 443 443""",
    "the machine": """
        init_module 175 105  finit_module 313 273  delete_module 176 106  kexec_load 246 104
        kexec_file_load 320 294  reboot 169 142  swapon 167 224  swapoff 168 225  acct 163 89  syslog 103 116
        vhangup 153 58  iopl 172 -  ioperm 173 -  sethostname 170 161  setdomainname 171 162
        settimeofday 164 170  clock_settime 227 112  adjtimex 159 171  clock_adjtime 305 266""",
    "scheduling": """
        sched_setscheduler 144 119  sched_setparam 142 118  sched_setattr 314 274  sched_setaffinity 203 122
        setpriority 141 140  ioprio_set 251 30  mbind 237 235  set_mempolicy 238 237
        set_mempolicy_home_node 450 450  migrate_pages 256 238  move_pages 279 239""",
}
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # instructions of classic BPF
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_AF_UNIX, _NEW_NAMESPACES, _MAP_HUGETLB, _F_SETPIPE_SZ = 1, 0x7E020000, 0x40000, 1031
_TIOCSTI, _TIOCLINUX, _PR_SET_SECCOMP, _PR_SCHED_CORE = 0x5412, 0x541C, 22, 62
_SO_SNDBUF, _SO_RCVBUF, _SO_ATTACH_FILTER, _SO_ATTACH_BPF = 7, 8, 26, 50
# Calls that are refused for some arguments: name, numbers as above, which argument, and how it compares with a value.
_REFUSED_WITH = (
    (
        "socket",
        41,
        198,
        0,
        "!=",
        (_AF_UNIX,),
    ),  # network namespaces do not separate AF_VSOCK, and load modules on demand
    ("socketpair", 53, 199, 0, "!=", (_AF_UNIX,)),
    ("clone", 56, 220, 0, "&", (_NEW_NAMESPACES,)),
    ("fcntl", 72, 25, 1, "==", (_F_SETPIPE_SZ,)),
    ("setsockopt", 54, 208, 2, "==", (_SO_SNDBUF, _SO_RCVBUF, _SO_ATTACH_FILTER, _SO_ATTACH_BPF)),
    ("mmap", 9, 222, 3, "&", (_MAP_HUGETLB,)),  # huge pages are a pool of the host
    ("ioctl", 16, 29, 1, "==", (_TIOCSTI, _TIOCLINUX)),
    ("prctl", 157, 167, 0, "==", (_PR_SET_SECCOMP, _PR_SCHED_CORE)),
)
_CLONE3, _NEWEST = 435, 450  # both the same on every architecture
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_* of the kernel
_M_ARENA_MAX = -8  # of man 3 mallopt
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MNT_DETACH = 2, 4, 4096, 16384, 2
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _AT_RECURSIVE, _SYS_MOUNT_SETATTR, _AT_FDCWD = 1, 2, 0x8000, 442, -100
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 4, 24, 38, 47, 4
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_TREE = "/sys"  # exists on every Linux and holds nothing that the sandbox shows
_ROOT = f"{_TREE}/root"

libc = ctypes.CDLL(None, use_errno=True)


def refused_calls(machine: str) -> dict[str, int]:
    """The names and numbers of the calls that are refused with any arguments."""
    words = " ".join(_REFUSED.values()).split()
    numbers = words[1::3] if machine == "x86_64" else words[2::3]
    return {name: int(number) for name, number in zip(words[::3], numbers, strict=True) if number != "-"}


def filter_calls(machine: str) -> list[tuple[int, int, int, int]]:
    """The BPF program for a machine: operation, jumps if true and if false, and a constant, for each instruction."""
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    absent = (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    program = [
        *((_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _MACHINES[machine]), (_RETURN, 0, 0, _KILL)),
        *((_LOAD, 0, 0, 0), (_GREATER, 0, 1, _NEWEST), absent),
        *((_EQUAL, 0, 1, _CLONE3), absent),  # a filter cannot read its flags; libraries then use clone
    ]
    for number in refused_calls(machine).values():
        program += [(_EQUAL, 0, 1, number), refuse]
    for _, x86, aarch, argument, comparison, values in _REFUSED_WITH:
        number = x86 if machine == "x86_64" else aarch
        program += [(_EQUAL, 0, 2 + 2 * len(values), number), (_LOAD, 0, 0, 16 + 8 * argument)]  # its lower 32 bits
        for value in values:
            operation = _ANY_BIT if comparison == "&" else _EQUAL
            program += [(operation, *((1, 0) if comparison == "!=" else (0, 1)), value), refuse]
        program.append((_RETURN, 0, 0, _ALLOW))
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def install_filter(program: list[tuple[int, int, int, int]]) -> None:
    """Filters the calls of this process and of all that it will start. Ends the process if the kernel does not."""
    text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    described = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(text)))
    no_new_privileges, filter_mode, zero = 38, 2, ctypes.c_ulong(0)
    if libc.prctl(no_new_privileges, ctypes.c_ulong(1), zero, zero, zero) or libc.prctl(
        _PR_SET_SECCOMP, ctypes.c_ulong(filter_mode), described, zero, zero
    ):
        sys.exit(f"the kernel accepts no filter of system calls (seccomp): {os.strerror(ctypes.get_errno())}")


def count_processes() -> int:
    """How many processes the kernel counts towards this user's limit: this one and the ones that built the sandbox."""
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    for count in range(1, 1 << 16):
        resource.setrlimit(resource.RLIMIT_NPROC, (count + 1, hard))
        try:
            child = os.fork()
        except (BlockingIOError, ValueError):
            continue
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return count
    sys.exit("the user may start no process here")


def set_limits(memory_bytes: int, cpu_seconds: int, num_processes: int, file_bytes: int) -> None:
    """Sets the limits of this process and of all that it will start."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 32,
        # 0 would still start the host's program for crashes, if core_pattern names one; 1 starts nothing (man 5 core).
        resource.RLIMIT_CORE: 1,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if num_processes >= 0:
        limits[resource.RLIMIT_NPROC] = count_processes() + num_processes
    libc.mallopt(_M_ARENA_MAX, 1)  # else each thread reserves 64 MiB of the address space
    for limit, wanted in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(limit, (value, value))  # soft and hard are the same, so that the code cannot raise them


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


def replace_mounts(scratch_bytes: int, paths: list[str]) -> None:
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
    call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process may trace this one


def leave_the_host(scratch_bytes: int, paths: list[str]) -> None:
    """Leaves the host's files behind and gives up all rights. Returns in a child process."""
    call("sethostname", "sandbox", len("sandbox"))
    replace_mounts(scratch_bytes, paths)
    give_up_all_rights()
    child = os.fork()
    while child:
        # Orphans of the sandbox become children of this process. When it ends, the kernel kills all that are left.
        ended, status = os.wait()
        if ended == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def main() -> None:
    """Runs the code of standard input. Exits as a program of its own would."""
    if len(sys.argv) > 6:
        leave_the_host(int(sys.argv[6]), sys.argv[7:])
    *limits, filtered = map(int, sys.argv[1:6])
    machine = os.uname().machine
    if filtered and machine not in _MACHINES:
        sys.exit(f"there is no filter of system calls for {machine}, only for {' and '.join(_MACHINES)}")
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    set_limits(*limits)
    if filtered:
        install_filter(filter_calls(machine))
    os.write(1, b"\n")  # says that the sandbox stands: the time limit begins here
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # until here errors go to the controller
    code = sys.stdin.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the controller may have used a socket, which works both ways
    os.closerange(3, num_files)
    os.environ.clear()
    sys.argv = ["-c"]
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)  # module site, which is not loaded, would add them
    sys.modules["__main__"] = module = type(sys)("__main__")
    try:
        exec(compile(code, "<model>", "exec"), vars(module))
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        sys.stdout.flush()
        print(f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
