"""What code that a model wrote may try to get out of a box. Each attempt prints "out" if it succeeds.

`values` of test_escapes.py fills in what they aim at. `HARMLESS` are also made without a sandbox, where they must
succeed: so they would be seen to.
"""

OUT = "\nprint('out')"
LIBC = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
CALL = "def call(result):\n    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))\n"
DETACH = (
    "import os, sys, time\n"
    "if os.fork() == 0:\n    os.setsid()\n"
    "    if os.fork() == 0: os.execv('/bin/sleep', ['sleep', '{seconds}'])\n"
    "    os._exit(0)\n"
    "time.sleep(0.2)\n"
)

HARMLESS = {
    "write to the home folder": "open('{home}/planted', 'w').write('x')" + OUT,
    "write to a folder of the host": "open('{folder}/planted', 'w').write('x')" + OUT,
    "read a secret file": "open('{folder}/id_rsa').read()" + OUT,
    "read a secret file through a shell": "import subprocess\n"
    "subprocess.check_output(['/bin/cat', '{folder}/id_rsa'])" + OUT,
    "read the list of the host's users": "open('/etc/passwd').read()" + OUT,
    "connect to a TCP server of the host": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)" + OUT,
    "connect to an abstract socket": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('\\0{name}')" + OUT,
    "connect to a socket in a folder": "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('{folder}/s')"
    + OUT,
    "signal the controller": "import os\nos.kill({pid}, 0)" + OUT,
    "see the host's processes": "assert '{pid}' in __import__('os').listdir('/proc')" + OUT,
    "read an environment variable": "assert __import__('os').environ['OWNLOOP_TEST_SECRET']" + OUT,
    "read the controller's environment": "open('/proc/{pid}/environ').read()" + OUT,
    "call the C library": LIBC + "assert libc.system(b'touch {folder}/planted') == 0" + OUT,
    "leave a process behind": DETACH + "print('out')",
    "open a network socket": "import socket\nsocket.socket()" + OUT,
    "open a netlink socket": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)" + OUT,
    "keep memory in a memfd": "import os\nos.memfd_create('x')" + OUT,
    "keep memory in System V": LIBC
    + CALL
    + "n = libc.shmget(0, 4096, 0o600)\ncall(n)\ncall(libc.shmctl(n, 0, None))"
    + OUT,
    "keep memory in a pipe": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETPIPE_SZ, 1 << 20)" + OUT,
    "keep memory in a socket": "import socket\nsocket.socketpair()[0].setsockopt(1, socket.SO_SNDBUF, 1 << 20)" + OUT,
    "watch files": LIBC + CALL + "call(libc.inotify_init1(0))" + OUT,
    "ask for a personality": LIBC + CALL + "call(libc.personality(0xFFFFFFFF))" + OUT,
    "choose a core": "import os\nos.sched_setaffinity(0, os.sched_getaffinity(0))" + OUT,
    "read a priority back": "import os\nos.setpriority(0, 0, os.getpriority(0, 0))" + OUT,
    "share the machine's name": "import os\nassert os.readlink('/proc/self/ns/uts') == '{name_space}'" + OUT,
}

HARMFUL = {
    "clear the list of what is forbidden": "import __main__\n__main__.forbidden.clear()" + OUT,
    "write to the Python that runs": "import os\nopen(os.__file__, 'a').write('')" + OUT,
    "write to /usr": "open('/usr/planted', 'w')" + OUT,
    "write beside the scratch folder": "open('/planted', 'w')" + OUT,
    "fill the scratch folder": "for i in range(100): open(str(i), 'wb').write(bytes(1 << 20))" + OUT,
    "fill the memory for files": "for i in range(100): open(f'/dev/shm/{{i}}', 'wb').write(bytes(1 << 20))" + OUT,
    "make files without end": "for i in range(10**9): open(str(i), 'w').close()" + OUT,
    "start processes without end": "import os\nwhile True: os.fork()" + OUT,
    "start twenty processes": "import os, time\nfor _ in range(20):\n    if os.fork() == 0: time.sleep(9)" + OUT,
    "take all memory": "x = []\nwhile True: x.append(bytearray(1 << 24))" + OUT,
    "take memory in processes": "import os\nfor _ in range(100): os.fork() or bytearray(1 << 27)" + OUT,
    "print 10 GB": "for _ in range(10 << 10): print('x' * (1 << 20))" + OUT,
    "loop forever": "while True: pass" + OUT,
    "ignore all signals": "import signal, time\n"
    "for s in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}: signal.signal(s, signal.SIG_IGN)\n"
    "time.sleep(60)" + OUT,
    "raise a limit": "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))" + OUT,
    "send a packet": "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('203.0.113.1', 9))" + OUT,
    "trace the controller": LIBC + CALL + "call(libc.ptrace(16, {pid}, 0, 0))" + OUT,
    "enter the host's files by process 1": "import os\nassert os.listdir('/proc/1/root')" + OUT,
    "kill process 1": "import os, time\nos.kill(1, 9)\ntime.sleep(0.2)\nraise OSError('still there')",
    "mount": LIBC + CALL + "call(libc.mount(b'tmpfs', b'/tmp', b'tmpfs', 0, None))" + OUT,
    "make a user namespace": LIBC + CALL + "call(libc.unshare(0x10000000))" + OUT,
    "become root": "import os\nos.setuid(0)" + OUT,
    "run a program of root's": "import subprocess\nassert b'uid=0' in subprocess.check_output('su -c id', shell=True)"
    + OUT,
    "make a device": "import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(254, 0))" + OUT,
    "leave the root folder": "import os\nos.mkdir('x'); os.chroot('x'); os.chdir('../../../..'); os.chroot('.')" + OUT,
    "set the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)" + OUT,
    "set the machine's name": "import socket\nsocket.sethostname('x')" + OUT,
    "write to another descriptor": "import os\n"
    "for fd in range(3, 10**4):\n    try: os.write(fd, b'x'); print('out')\n    except OSError: pass\nraise OSError",
}

SYSTEM_CALLS = {  # name of a call, arguments; also made with their real arguments where that says more
    "join the host's session keyring": ("keyctl", "0, -3, 0"),
    "add a key to a keyring": ("add_key", "b'user', b'x', b'y', 1, -3"),
    "ask for a key of the host": ("request_key", "b'user', b'x', 0, -3"),
    "set up an io_uring": ("io_uring_setup", "1, bytes(120)"),
    "set up asynchronous input": ("io_setup", "1, bytes(8)"),
    "load a program into the kernel": ("bpf", "0, bytes(72), 72"),
    "count events of the processor": ("perf_event_open", "bytes(112), 0, -1, -1, 0"),
    "handle page faults": ("userfaultfd", "1"),
    "install a filter": ("seccomp", "2, 0, None"),
    "make a landlock": ("landlock_create_ruleset", "None, 0, 1"),
    "keep secret memory": ("memfd_secret", "0"),
    "read another process's memory": ("process_vm_readv", "1, None, 0, None, 0, 0"),
    "write another process's memory": ("process_vm_writev", "1, None, 0, None, 0, 0"),
    "compare processes": ("kcmp", "1, 1, 0, 0, 0"),
    "take a descriptor of another process": ("pidfd_getfd", "0, 0, 0"),
    "be traced": ("ptrace", "0, 0, 0, 0"),
    "unmount": ("umount2", "b'/tmp', 2"),
    "change the root": ("pivot_root", "b'.', b'.'"),
    "open a file system": ("fsopen", "b'tmpfs', 0"),
    "open a tree of mounts": ("open_tree", "-100, b'/', 1"),
    "set attributes of a mount": ("mount_setattr", "-100, b'/', 0, bytes(32), 32"),
    "open a file by its handle": ("open_by_handle_at", "-100, bytes(64), 0"),
    "read the kernel's log": ("syslog", "3, bytes(99), 99"),
    "load a module": ("init_module", "bytes(9), 9, b''"),
    "load another kernel": ("kexec_load", "0, 0, None, 0"),
    "restart the machine": ("reboot", "0, 0, 0, None"),  # with wrong magic numbers
    "swap": ("swapon", "b'/tmp/x', 0"),
    "account": ("acct", "None"),
    "hang up the terminal": ("vhangup", ""),
    "adjust the clock": ("adjtimex", "b'\\1' + bytes(207)"),
    "run in real time": ("sched_setscheduler", "0, 1, b'\\1\\0\\0\\0'"),
    "read and write in real time": ("ioprio_set", "1, 0, 1 << 13"),
    "move pages": ("migrate_pages", "0, 1, None, None"),
    "watch the file system": ("fanotify_init", "0, 0"),
    "make a message queue": ("msgget", "0, 0o1600"),
    "make a semaphore": ("semget", "0, 1, 0o1600"),
    "enter a namespace": ("setns", "0, 0"),
    "set a quota": ("quotactl", "0, None, 0, None"),
}
CALLED = {
    name: LIBC + CALL + f"call(libc.syscall({{calls[{call}]}}, {arguments}))" + OUT
    for name, (call, arguments) in SYSTEM_CALLS.items()
}
FAMILIES = {
    "AF_VSOCK": (40, 1), "AF_ALG": (38, 5), "AF_PACKET": (17, 3), "AF_TIPC": (30, 1), "AF_XDP": (44, 3),
    "AF_RDS": (21, 5), "AF_BLUETOOTH": (31, 3), "AF_CAN": (29, 3), "AF_KEY": (15, 3), "AF_NFC": (39, 5),
}  # fmt: skip
OPENED = {
    f"open {name}": LIBC + CALL + f"call(libc.socket({family}, {kind}, 0))" + OUT
    for name, (family, kind) in FAMILIES.items()
}
UNSHARED = {
    f"make a {name} namespace": LIBC + CALL + f"call(libc.unshare({flag}))" + OUT
    for name, flag in {"mount": 0x20000, "network": 0x40000000, "PID": 0x20000000, "IPC": 0x08000000}.items()
}
READ = {
    f"read {path}": f"assert open('{path}', 'rb').read(99)" + OUT
    for path in (
        *(
            "/etc/shadow",
            "/proc/kcore",
            "/proc/kmsg",
            "/proc/1/environ",
            "/proc/1/mem",
            "/proc/1/maps",
            "/proc/vmallocinfo",
        ),
        *("/proc/1/root/etc/passwd", "/proc/1/fd/0", "/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/kvm", "/dev/fuse"),
        *(
            "/dev/net/tun",
            "/sys/kernel/security/lsm",
            "/sys/fs/cgroup/cgroup.procs",
            "/root/.bashrc",
            "/var/log/dpkg.log",
        ),
    )
}
WRITTEN = {
    f"write {path}": f"import os\nos.write(os.open('{path}', os.O_WRONLY), b'{text}')" + OUT
    for path, text in {
        "/proc/sys/kernel/core_pattern": "x", "/proc/sys/kernel/hostname": "x", "/proc/sys/net/ipv4/ip_forward": "1",
        "/proc/sysrq-trigger": "?", "/proc/self/oom_score_adj": "-1000", "/proc/self/uid_map": "0 0 1",
        "/proc/1/oom_score_adj": "1000", "/proc/self/exe": "x", "/etc/passwd": "x", "/usr/bin/env": "x",
        "/sys/fs/cgroup/cgroup.procs": "1", "/proc/self/setgroups": "allow", "/proc/1/comm": "x",
    }.items()
}  # fmt: skip
MORE = {
    "reach the host by IPv6": "import socket\nsocket.create_connection(('::1', {port}), 1)" + OUT,
    "reach the metadata of a cloud": "import socket\nsocket.create_connection(('169.254.169.254', 80), 1)" + OUT,
    "resolve a name": "import socket\nsocket.getaddrinfo('example.com', 80)" + OUT,
    "send a raw packet": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)" + OUT,
    "own a set-user-ID program": "import os\nopen('x', 'w').close(); os.chown('x', 0, 0)" + OUT,
    "become another group": "import os\nos.setgid(0)" + OUT,
    "have further groups": "import os\nos.setgroups([0])" + OUT,
    "make a character device": "import os, stat\nos.mknod('mem', stat.S_IFCHR | 0o600, os.makedev(1, 1))" + OUT,
    "link a file of the host": "import os\nos.link('/usr/bin/env', '/tmp/env')" + OUT,
    "reach a file by a link": "import os\nos.symlink('{folder}/id_rsa', 'l')\nopen('l').read()" + OUT,
    "leave by the folder above": "open('../../../../../..{folder}/id_rsa').read()" + OUT,
    "stop process 1": "import os, time\nos.kill(1, 19)\ntime.sleep(0.2)\nraise OSError('still there')",
    "crash process 1": "import os\nfor s in (3, 4, 6, 7, 8, 11, 15): os.kill(1, s)\nraise OSError('still there')",
    "kill all": "import os\nos.kill(-1, 9)\nraise OSError('alone')",
    "start threads without end": "import threading, time\n"
    "while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()" + OUT,
    "open files without end": "x = []\nwhile len(x) < 5000: x.append(open('/dev/null'))" + OUT,
    "make a file of a terabyte": "open('x', 'wb').truncate(1 << 40)" + OUT,
    "reserve the disk": "import os\nos.posix_fallocate(os.open('x', 66), 0, 1 << 30)" + OUT,
    "share memory without end": "import mmap\nx = []\n"
    "while True:\n    x.append(mmap.mmap(-1, 1 << 24))\n    x[-1].write(bytes(1 << 24))" + OUT,
    "lock memory": LIBC + CALL + "call(libc.mlockall(3))" + OUT,
    "take huge pages": "import mmap\nmmap.mmap(-1, 1 << 21, 0x40022)" + OUT,
    "raise the limit of processes": "import resource\nresource.setrlimit(resource.RLIMIT_NPROC, (10**5, 10**5))" + OUT,
    "type into the terminal": "import fcntl\nfcntl.ioctl(0, 0x5412, b'x')" + OUT,
    "be nice to itself": "import os\nos.nice(-5)" + OUT,
    "nest folders without end": "import os\nwhile True: os.mkdir('x'); os.chdir('x')" + OUT,
    "leave a process that ignores all": "import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n"
    "    for s in set(signal.Signals) - {{signal.SIGKILL, signal.SIGSTOP}}: signal.signal(s, signal.SIG_IGN)\n"
    "    os.execv('/bin/sleep', ['sleep', '{seconds}'])\nraise OSError('left')",
    "leave a process that stands still": "import os\nif os.fork() == 0:\n    os.setsid()\n"
    "    os.kill(os.getpid(), 19)\n    os.execv('/bin/sleep', ['sleep', '{seconds}'])\nraise OSError('left')",
}
ATTEMPTS = {**HARMLESS, **HARMFUL, **CALLED, **OPENED, **UNSHARED, **READ, **WRITTEN, **MORE}

ENDLESS = ("loop forever", "ignore all signals", "make files without end", "print 10 GB", "nest folders without end")
ALLOWED_TO_PROGRAMS = ("read the list of the host's users", "open a network socket", "write beside the scratch folder")
"""They see the whole system, have a network of their own, and may write everywhere in a box of their own."""
