"""Runs first in every box: builds it where no other program did, limits this process, filters its calls, and goes on.

It is started with `python -c` and the text of this file, so it imports nothing but the standard library. Its arguments:

1. the text of `inner_serve.py`, which then runs commands in the box; "" runs the code of standard input instead
2. the settings of `inner_serve.py`, as JSON
3. what may be reached: "nothing", one "endpoint", or "all", which filters no system calls
4. numbers, with commas between them, -1 for no limit: bytes of memory, seconds of CPU time, processes that may be
   started, bytes of a file, open files, and files of the box that are counted by looking (0: by the kernel)
5. bytes and files of the folders that can be written; then the folders to show, and those to make, which begin with +

With the fifth, this file builds the box: new namespaces, in which it is process 1, and mounts. It needs a kernel that
lets this user make them, and no other program. As root it becomes "nobody".

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
_NEW_NAMESPACES, _NEW_USER, _MAP_HUGETLB, _F_SETPIPE_SZ = 0x7E020000, 0x10000000, 0x40000, 1031
_TIOCSTI, _TIOCLINUX, _PR_SET_SECCOMP, _PR_SCHED_CORE = 0x5412, 0x541C, 22, 62
_SOL_SOCKET, _SO_SNDBUF, _SO_RCVBUF, _SO_ATTACH_FILTER, _SO_ATTACH_BPF = 1, 7, 8, 26, 50
# The network namespace has nothing but its own loopback. Of the other families, no namespace separates AF_VSOCK, and
# some load modules on demand.
FAMILIES = {"nothing": (1,), "endpoint": (1, 2, 10)}  # AF_UNIX, AF_INET, AF_INET6
# Calls that are refused for some arguments: name, numbers as above, which argument, and how it compares with values.
_REFUSED_WITH = (
    ("clone", 56, 220, 0, "&", (_NEW_NAMESPACES,)),
    ("fcntl", 72, 25, 1, "==", (_F_SETPIPE_SZ,)),
    ("mmap", 9, 222, 3, "&", (_MAP_HUGETLB,)),  # huge pages are a pool of the host
    ("ioctl", 16, 29, 1, "==", (_TIOCSTI, _TIOCLINUX)),
    ("prctl", 157, 167, 0, "==", (_PR_SET_SECCOMP, _PR_SCHED_CORE)),
)
_SET_OPTION = (_SO_SNDBUF, _SO_RCVBUF, _SO_ATTACH_FILTER, _SO_ATTACH_BPF)  # of a socket, not of its protocol
_CLONE3, _NEWEST = 435, 450  # both the same on every architecture
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_* of the kernel
_M_ARENA_MAX = -8  # of man 3 mallopt
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 2, 4, 8, 4096, 16384, 1 << 18, 2
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _AT_RECURSIVE, _SYS_MOUNT_SETATTR, _AT_FDCWD = 1, 2, 0x8000, 442, -100
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _SIGKILL, _NOBODY, _KEYCTL_JOIN_SESSION_KEYRING = 1, 36, 9, 65534, 1
_SIOCSIFFLAGS, _IFF_UP, _KEYCTL = 0x8914, 1, {"x86_64": 250, "aarch64": 219}
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


def filter_calls(machine: str, reach: str = "nothing") -> list[tuple[int, int, int, int]]:
    """The BPF program for a machine: operation, jumps if true and if false, and a constant, for each instruction."""
    allow, refuse = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERROR | errno.EPERM)
    absent = (_RETURN, 0, 0, _ERROR | errno.ENOSYS)
    program = [
        *((_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _MACHINES[machine]), (_RETURN, 0, 0, _KILL)),
        *((_LOAD, 0, 0, 0), (_GREATER, 0, 1, _NEWEST), absent),
        *((_EQUAL, 0, 1, _CLONE3), absent),  # a filter cannot read its flags; libraries then use clone
    ]
    for number in refused_calls(machine).values():
        program += [(_EQUAL, 0, 1, number), refuse]

    def add(x86: int, aarch: int, body: list[tuple[int, int, int, int]]) -> None:
        program.extend([(_EQUAL, 0, len(body) + 1, x86 if machine == "x86_64" else aarch), *body, allow])

    families = FAMILIES[reach]
    for x86, aarch, allowed in ((41, 198, families), (53, 199, (1,))):  # socket, socketpair
        tests = [(_EQUAL, len(allowed) - place, 0, value) for place, value in enumerate(allowed)]
        add(x86, aarch, [_argument(0), *tests, refuse])
    for _, x86, aarch, argument, comparison, values in _REFUSED_WITH:
        add(x86, aarch, [_argument(argument), *_refused_values(comparison, values, refuse)])
    options = [_argument(2), *_refused_values("==", _SET_OPTION, refuse)]
    add(54, 208, [_argument(1), (_EQUAL, 0, len(options), _SOL_SOCKET), *options])
    return [*program, allow]


def _argument(number: int) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, 16 + 8 * number)  # its lower 32 bits


def _refused_values(
    comparison: str, values: tuple[int, ...], refuse: tuple[int, int, int, int]
) -> list[tuple[int, int, int, int]]:
    operation = _ANY_BIT if comparison == "&" else _EQUAL
    return [each for value in values for each in ((operation, 0, 1, value), refuse)]


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


def set_limits(
    memory_bytes: int, cpu_seconds: int, num_processes: int, file_bytes: int, num_open: int, *, address_space: bool
) -> None:
    """Sets the limits of this process and of all that it will start. -1 sets none.

    Memory is the address space, or what of it can be written: programs reserve more than they use.
    """
    limits = {
        resource.RLIMIT_AS if address_space else resource.RLIMIT_DATA: memory_bytes,
        resource.RLIMIT_STACK: 8 << 20,
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: num_open,
        # 0 would still start the host's program for crashes, if core_pattern names one; 1 starts nothing (man 5 core).
        resource.RLIMIT_CORE: 1,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_NPROC: count_processes() + num_processes if num_processes >= 0 else -1,
    }
    libc.mallopt(_M_ARENA_MAX, 1)  # else each thread reserves 64 MiB of the address space
    for limit, wanted in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if wanted >= 0:
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
    """Makes a file or folder of the host visible under the same path. Links in the root folder stay links."""
    target = f"{_ROOT}{path}"
    if os.path.islink(path) and path.count("/") == 1:
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    call("mount", path, target, None, _MS_BIND | _MS_REC, None)


def set_attributes(path: str, flags: int, on: int, off: int) -> None:
    """Sets attributes of the mount at a path and, with _AT_RECURSIVE, of all below it."""
    attributes = (ctypes.c_uint64 * 4)(on, off, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, path, flags, attributes, size)


def replace_mounts(scratch_bytes: int, num_files: int, paths: list[str]) -> None:
    """Replaces all mounts by a tree that shows `paths` read-only.

    It can be written in /tmp, or, with folders to make, everywhere but in `paths`, and has /proc and terminals.
    """
    made = [path[1:] for path in paths if path[0] == "+"]
    tmpfs(_TREE, 1 << 20, 256, "0755")
    os.mkdir(_ROOT)
    if made:
        tmpfs(_ROOT, scratch_bytes, num_files, "0755")
    for path in paths:
        if path[0] != "+":
            show(path)
    os.makedirs(f"{_ROOT}/tmp", exist_ok=True)
    os.symlink("/tmp", f"{_ROOT}/dev/shm")
    set_attributes(_TREE, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID, 0)
    if made:
        set_attributes(_ROOT, 0, 0, _MOUNT_ATTR_RDONLY)
        for path in ("/tmp", "/proc", "/dev/pts", *made):
            os.makedirs(f"{_ROOT}{path}", exist_ok=True)
            os.chmod(f"{_ROOT}{path}", 0o777)
        call("mount", "proc", f"{_ROOT}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
        terminals = "newinstance,ptmxmode=0666,mode=620,max=64"
        call("mount", "devpts", f"{_ROOT}/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, terminals)
        for name, path in (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0")):
            os.symlink(path, f"{_ROOT}/dev/{name}")
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.symlink(f"/proc/self/fd/{number}", f"{_ROOT}/dev/{name}")
    else:
        tmpfs(f"{_ROOT}/tmp", scratch_bytes, num_files, "1777")
    os.chdir(_TREE)
    call("pivot_root", ".", ".")
    call("umount2", ".", _MNT_DETACH)


def open_loopback() -> None:
    """Switches on the network device that leads to this box alone."""
    import fcntl
    import socket

    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def give_up_all_rights() -> None:
    """Drops every capability for good."""
    call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    number = 0
    while libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) == 0:  # fails at the first that this kernel does not have
        number += 1
    call("capset", (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


def map_user(proc: int, process: str, user: int, group: int) -> None:
    """Gives "nobody" of a process's user namespace an id outside."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_NOBODY} {user} 1"),
        ("gid_map", f"{_NOBODY} {group} 1"),
    ):
        file = os.open(f"{process}/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)


def become_nobody() -> None:
    """Leaves root for a user to whom limits apply."""
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def leave_the_host(sizes: str, paths: list[str]) -> None:
    """Leaves the host's files and processes behind and gives up all rights. Returns as process 1 of the namespaces."""
    scratch_bytes, num_files = map(int, sizes.split(","))
    os.umask(0o022)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    is_root = libc.unshare(_NEW_NAMESPACES & ~_NEW_USER) == 0  # it may mount what only root can read
    if not is_root:
        if os.geteuid() == 0:
            os.setgroups([])
            become_nobody()
            call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own /proc belongs to root
        user, group = os.geteuid(), os.getegid()
        call("unshare", _NEW_NAMESPACES)
        map_user(proc, "self", user, group)
    call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    asked, ask = os.pipe()
    answered, answer = os.pipe()
    child = os.fork()
    if child:
        os.close(ask)
        if is_root and os.read(asked, 1):
            map_user(proc, str(child), _NOBODY, _NOBODY)
            os.write(answer, b"x")
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    call("mount", "none", "/", None, _MS_REC | _MS_PRIVATE, None)
    call("sethostname", "sandbox", len("sandbox"))
    open_loopback()
    replace_mounts(scratch_bytes, num_files, paths)
    if is_root:
        os.setgroups([])
        call("unshare", _NEW_USER)
        os.write(ask, b"x")
        os.read(answered, 1)
        become_nobody()
    for fd in (proc, asked, ask, answered, answer):
        os.close(fd)
    # The kernel refuses new user namespaces, in which the code would have rights again, to a process in a chroot.
    os.chroot("/root")
    os.chdir("/tmp")
    give_up_all_rights()
    call("prctl", _PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def continue_in_a_child(num_files: int) -> None:
    """Returns in a child process, and ends with its status, when the kernel kills all that are left.

    Orphans of the box become children of this process. It looks how many files there are, unless `num_files` is 0.
    """
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    child = os.fork()
    while child:
        signal.sigtimedwait({signal.SIGCHLD}, 0.02 if num_files else 60)
        with_files = os.statvfs("/tmp")
        if num_files and with_files.f_files - with_files.f_ffree > num_files:
            os.kill(-1, signal.SIGKILL)
        ended, status = os.waitpid(-1, os.WNOHANG)
        while ended:
            if ended == child:
                os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
            ended, status = os.waitpid(-1, os.WNOHANG)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def main() -> None:
    """Runs the code of standard input, or the server. Exits as a program of its own would."""
    server, _, reach, numbers = sys.argv[1:5]
    *limits, num_files = map(int, numbers.split(","))
    machine = os.uname().machine
    if reach != "all" and machine not in _MACHINES:
        sys.exit(f"there is no filter of system calls for {machine}, only for {' and '.join(_MACHINES)}")
    if len(sys.argv) > 5:
        leave_the_host(sys.argv[5], sys.argv[6:])
    if reach != "all":
        libc.syscall(_KEYCTL[machine], _KEYCTL_JOIN_SESSION_KEYRING, None)
        call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)  # no process may trace this one
        if not server:
            continue_in_a_child(num_files)
    else:
        call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    num_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    set_limits(*limits, address_space=not server)
    if reach != "all":
        install_filter(filter_calls(machine, reach))
    if server:
        exec(compile(server, "<inner_serve>", "exec"), {"__name__": "__main__"})  # it reads the settings of argv
    else:
        run_code(num_open)


def run_code(num_open: int) -> None:
    """Runs the code of standard input."""
    os.write(1, b"\n")  # says that the sandbox stands: the time limit begins here
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # until here errors go to the controller
    code = sys.stdin.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the controller may have used a socket, which works both ways
    os.closerange(3, num_open)
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
