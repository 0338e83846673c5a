"""Count and optionally delay the files that each process of a command opens under Python's folders.

    with TemporaryDirectory() as folder:
        subprocess.run(command, env={**os.environ, **slow_files.environment(Path(folder), delay_seconds=0.001)})
        for process in slow_files.processes(Path(folder)):
            print(process.pid, process.is_forked, process.opens, process.stats, process.libraries)

A delay simulates the latency of a network file system; with the default of 0, files are only counted. A small C
library, compiled by `cc` into the folder and loaded with LD_PRELOAD, intercepts the C library's open and stat. It
covers every process that inherits the environment: launchers, node processes, and workers started by exec or fork.
Each process has its own slot in a mapped file, so killed processes are counted, too. A forked process counts from its
fork: the ratio of its opens to those of a new interpreter is the share that the fork did not save.

Calls are counted and delayed if their path is absolute and under one of `folders`, whether the file exists or not, as a
file server would see them without a client's cache. The dynamic loader's own opens cannot be intercepted: each library
that it loads counts once, and its delay is added to the process's next open. Reads are not delayed.

strace can delay calls, too (`--seccomp-bpf -e inject=openat:delay_enter=1ms`), but cannot select folders; it needs
ptrace and stops at each of the 42,000 calls of importing torch and torchvision. The overhead of this library is within
the noise: 4.0 to 4.4 s of CPU time without it, 4.0 to 5.0 s with it (4 pairs, 2 shared cores).
"""

from __future__ import annotations

import mmap
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 4096
struct slot { long pid, is_forked, opens, stats, libraries; char command[216]; };
struct table { long used, unused[31]; struct slot slots[SLOTS]; };

static struct table *table;
static struct slot *own, spare;
static long delay_ns;
static unsigned long long libraries_seen;
static char folders[8192];

static void claim(int is_forked) {
  long number = table ? __atomic_fetch_add(&table->used, 1, __ATOMIC_RELAXED) : SLOTS;
  own = number < SLOTS ? &table->slots[number] : &spare;
  own->is_forked = is_forked;
  int file = openat(AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
  if (file >= 0) {
    long length = read(file, own->command, sizeof own->command - 1);
    for (long i = 0; i + 1 < length; i++) if (!own->command[i]) own->command[i] = ' ';
    close(file);
  }
  own->pid = getpid();
}

static int first_object(struct dl_phdr_info *info, size_t size, void *added) {
  *(unsigned long long *)added = info->dlpi_adds;
  return 1;
}

static void wait_for(long times) {
  if (times <= 0 || !delay_ns) return;
  long long all = (long long)times * delay_ns;
  struct timespec left = {all / 1000000000, all % 1000000000};
  while (nanosleep(&left, &left)) {}
}

static void count_libraries(void) {
  unsigned long long added = libraries_seen;
  dl_iterate_phdr(first_object, &added);
  long more = added - __atomic_exchange_n(&libraries_seen, added, __ATOMIC_RELAXED);
  __atomic_fetch_add(&own->libraries, more, __ATOMIC_RELAXED);
  wait_for(more);
}

static void after_fork(void) { claim(1); }

__attribute__((constructor)) static void start(void) {
  const char *path = getenv("SLOW_FILES_TABLE"), *delay = getenv("SLOW_FILES_DELAY_NS");
  const char *list = getenv("SLOW_FILES_FOLDERS");
  if (!path || !list) return;
  delay_ns = delay ? atol(delay) : 0;
  snprintf(folders, sizeof folders, "%s", list);
  int file = openat(AT_FDCWD, path, O_RDWR | O_CLOEXEC);
  if (file < 0) return;
  table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (table == MAP_FAILED) { table = NULL; return; }
  claim(0);
  pthread_atfork(NULL, NULL, after_fork);
}

static int is_ours(const char *path) {
  if (!own || !path || path[0] != '/') return 0;
  for (const char *folder = folders; *folder;) {
    size_t length = strcspn(folder, ":");
    if (length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length])) return 1;
    folder += length + (folder[length] == ':');
  }
  return 0;
}

static void note(const char *path, int is_open) {
  if (!is_ours(path)) return;
  count_libraries();
  __atomic_fetch_add(is_open ? &own->opens : &own->stats, 1, __ATOMIC_RELAXED);
  wait_for(1);
}

#define NEXT(name) ({ static __typeof__(&name) next; if (!next) next = dlsym(RTLD_NEXT, #name); next; })
#define MODE mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { \
  va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
#define OPEN(name) int name(const char *path, int flags, ...) { \
  MODE note(path, 1); return NEXT(name)(path, flags, mode); }
#define OPENAT(name) int name(int at, const char *path, int flags, ...) { \
  MODE note(path, 1); return NEXT(name)(at, path, flags, mode); }
#define FOPEN(name) FILE *name(const char *path, const char *mode) { note(path, 1); return NEXT(name)(path, mode); }
#define STAT(name, type) int name(const char *path, struct type *found) { \
  note(path, 0); return NEXT(name)(path, found); }
#define STATAT(name, type) int name(int at, const char *path, struct type *found, int flags) { \
  note(path, 0); return NEXT(name)(at, path, found, flags); }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64) FOPEN(fopen) FOPEN(fopen64)
STAT(stat, stat) STAT(stat64, stat64) STAT(lstat, stat) STAT(lstat64, stat64)
STATAT(fstatat, stat) STATAT(fstatat64, stat64)
"""
HEADER_BYTES, SLOT, SLOTS = 256, struct.Struct("=5q216s"), 4096  # as in the C source


@dataclass(frozen=True)
class Process:
    """The calls of one process; for a forked process, since its fork.

    Args:
        opens: Calls of open under the folders, including missing files.
        stats: Calls of stat and lstat under the folders, including missing files.
        libraries: Shared libraries that it loaded from any folder.
    """

    pid: int
    is_forked: bool
    opens: int
    stats: int
    libraries: int
    command: str


def environment(folder: Path, delay_seconds: float = 0.0, folders: Sequence[Path] = ()) -> dict[str, str]:
    """Return the environment variables that count, and delay, the calls of a command's processes.

    Args:
        folder: Holds the compiled library and the counts; each call resets the counts, so use one folder per command.
        folders: Folders whose files are counted; by default those of the environment, the standard library and
            sys.path.

    Raises:
        FileNotFoundError: There is no C compiler `cc`.
        subprocess.CalledProcessError: The compiler failed.
    """
    folder = folder.resolve()
    source, library, table = folder / "slow_files.c", folder / "slow_files.so", folder / "slow_files.table"
    if not library.exists():
        source.write_text(SOURCE)
        compiler = ["cc", "-shared", "-fPIC", "-O1", "-w", "-U_FORTIFY_SOURCE", "-o", str(library), str(source)]
        subprocess.run([*compiler, "-ldl", "-lpthread"], check=True)
    table.write_bytes(bytes(HEADER_BYTES + SLOTS * SLOT.size))
    found = [str(path) for path in folders] or [sys.prefix, sys.base_prefix, *(path for path in sys.path if path)]
    return {
        "LD_PRELOAD": str(library),
        "SLOW_FILES_TABLE": str(table),
        "SLOW_FILES_DELAY_NS": str(round(delay_seconds * 1e9)),
        "SLOW_FILES_FOLDERS": ":".join(dict.fromkeys(found)),
    }


def processes(folder: Path) -> list[Process]:
    """Return every process of the command, in the order of their starts, with its counts so far.

    A process that calls exec is listed once per program.
    """
    with (folder / "slow_files.table").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as table:
        used = min(struct.unpack_from("=q", table)[0], SLOTS)
        slots = [SLOT.unpack_from(table, HEADER_BYTES + number * SLOT.size) for number in range(used)]
    return [
        Process(pid, bool(is_forked), opens, stats, libraries, command.rstrip(b"\0").decode(errors="replace"))
        for pid, is_forked, opens, stats, libraries, command in slots
    ]
