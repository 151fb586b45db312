/* What a guest can do that has taken over its VMM: a program in a jail that tries what it is told.
 *
 * Static, so that it needs no library after it was enclosed. It inherits a Unix socket (descriptor argv[1]), reads lines
 * from it, and answers each with "ok", "ok TEXT" or the name of the error.
 *
 *   read PATH, write PATH, list PATH, connect PATH, tcp PORT, kill PID, trace PID, peek PID, become UID,
 *   mknod PATH, mount, chroot, unshare, userns, threads N, grow MIB, raise, ids, up, uring, netlink
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

static void *sleeper(void *unused) {
    pause();
    return unused;
}

/* The result of a system call as text. */
static void result(char *out, size_t size, long value) {
    snprintf(out, size, "%s", value < 0 ? strerrorname_np(errno) : "ok");
}

static void list(char *out, size_t size, const char *path) {
    DIR *folder = opendir(path);
    if (!folder) {
        result(out, size, -1);
        return;
    }
    size_t used = snprintf(out, size, "ok");
    for (struct dirent *e; (e = readdir(folder));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            used += snprintf(out + used, size - used, " %s", e->d_name);
    closedir(folder);
}

static void try(char *word, char *rest, char *out, size_t size) {
    long number = atol(rest);
    if (!strcmp(word, "read") || !strcmp(word, "write")) {
        int fd = open(rest, *word == 'r' ? O_RDONLY : O_WRONLY | O_CREAT, 0600);
        char byte = 'x';
        long n = fd < 0 ? -1 : *word == 'r' ? read(fd, &byte, 1) : write(fd, &byte, 1);
        result(out, size, n);
    } else if (!strcmp(word, "list")) {
        list(out, size, rest);
    } else if (!strcmp(word, "connect")) {
        struct sockaddr_un a = {.sun_family = AF_UNIX};
        strncpy(a.sun_path, rest, sizeof a.sun_path - 1);
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        result(out, size, fd < 0 ? -1 : connect(fd, (void *)&a, sizeof a));
    } else if (!strcmp(word, "tcp")) {
        struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(number), .sin_addr.s_addr = htonl(0x7f000001)};
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        result(out, size, fd < 0 ? -1 : connect(fd, (void *)&a, sizeof a));
    } else if (!strcmp(word, "netlink")) {
        result(out, size, socket(AF_NETLINK, SOCK_RAW, 0));
    } else if (!strcmp(word, "kill")) {
        result(out, size, kill(number, SIGKILL));
    } else if (!strcmp(word, "trace")) {
        result(out, size, ptrace(PTRACE_ATTACH, number, 0, 0));
    } else if (!strcmp(word, "peek")) {
        char byte;
        struct iovec here = {&byte, 1}, there = {(void *)0x400000, 1};
        result(out, size, process_vm_readv(number, &here, 1, &there, 1, 0));
    } else if (!strcmp(word, "become")) {
        result(out, size, syscall(SYS_setresuid, number, number, number));
    } else if (!strcmp(word, "mknod")) {
        result(out, size, mknod(rest, S_IFBLK | 0600, makedev(254, 0)));
    } else if (!strcmp(word, "mount")) {
        result(out, size, mount("none", "/", "tmpfs", 0, 0));
    } else if (!strcmp(word, "chroot")) {
        result(out, size, chroot("/"));
    } else if (!strcmp(word, "unshare")) {
        result(out, size, unshare(CLONE_NEWNS));
    } else if (!strcmp(word, "userns")) {
        result(out, size, unshare(CLONE_NEWUSER));
    } else if (!strcmp(word, "uring")) {
        char parameters[120] = {0};
        result(out, size, syscall(SYS_io_uring_setup, 1, parameters));
    } else if (!strcmp(word, "raise")) {
        struct rlimit core = {RLIM_INFINITY, RLIM_INFINITY};
        result(out, size, setrlimit(RLIMIT_CORE, &core));
    } else if (!strcmp(word, "threads")) {
        pthread_t thread;
        long started = 0;
        int error = 0;
        while (started < number && !(error = pthread_create(&thread, 0, sleeper, 0))) started++;
        snprintf(out, size, "%s %ld", error ? strerrorname_np(error) : "ok", started);
    } else if (!strcmp(word, "grow")) {
        char *memory = mmap(0, number << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            result(out, size, -1);
            return;
        }
        memset(memory, 1, number << 20);
        snprintf(out, size, "ok");
    } else if (!strcmp(word, "up")) {
        /* The oldest way out: up from a working directory or an open folder that lies outside of the root. */
        for (int fd = 0; fd < 64; fd++) {
            struct stat s;
            if (!fstat(fd, &s) && S_ISDIR(s.st_mode)) {
                snprintf(out, size, "ok %d", fd);
                return;
            }
        }
        for (int step = 0; step < 64; step++)
            if (chdir("..")) break;
        list(out, size, ".");
    } else if (!strcmp(word, "ids")) {
        char name[64] = "?";
        gethostname(name, sizeof name);
        snprintf(out, size, "ok %d %d %d %d %s", getpid(), getppid(), getuid(), getgid(), name);
    } else {
        snprintf(out, size, "what?");
    }
}

int main(int argc, char **argv) {
    static char line[4096], out[65536];
    FILE *in = argc > 1 ? fdopen(atoi(argv[1]), "r") : 0;
    if (!in) return 2;
    int link = atoi(argv[1]);
    dprintf(link, "ready\n");
    while (fgets(line, sizeof line, in)) {
        line[strcspn(line, "\n")] = 0;
        char *rest = strchr(line, ' ');
        if (rest) *rest++ = 0;
        try(line, rest ? rest : "", out, sizeof out);
        dprintf(link, "%s\n", out);
    }
    return 0;
}
