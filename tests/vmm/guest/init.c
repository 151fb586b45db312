/* The whole user space of the test guest: PID 1, a counter, and a line protocol on TCP port 7000.
 *
 * Commands (one line, one line of answer):
 *   ping                 pong
 *   count                how often the counter process has woken up
 *   fill MIB SEED        allocate and fill memory with a pattern; answers its hash
 *   sum                  hash of that memory as it is now
 *   zero                 overwrite that memory with zeros
 *   dwrite MIB SEED      write 1 MiB of pattern to the disk at that offset, durable; answers its hash
 *   dsum MIB             hash of 1 MiB of disk at that offset, read past the guest's page cache
 *   spin N               N rounds of arithmetic; answers nanoseconds
 *   cmdline              the kernel command line
 *   reseeds              how often the kernel has reseeded its random numbers because the VM was copied
 *   dsize                size of the disk in bytes
 *   release              give the filled memory back to the kernel
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <net/if.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/klog.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#define MIB (1UL << 20)

static uint64_t *memory;
static size_t words;

static uint64_t hash(const uint64_t *p, size_t n) {
    uint64_t h = 14695981039346656037UL;
    for (size_t i = 0; i < n; i++) h = (h ^ p[i]) * 1099511628211UL;
    return h;
}

static void pattern(uint64_t *p, size_t n, uint64_t seed) {
    uint64_t x = seed * 2654435761UL + 1;
    for (size_t i = 0; i < n; i++) {
        x ^= x << 13; x ^= x >> 7; x ^= x << 17;
        p[i] = x;
    }
}

static void load_modules(void) {
    char line[64], path[80];
    FILE *list = fopen("/modules/order", "r");
    while (list && fgets(line, sizeof line, list)) {
        line[strcspn(line, "\n")] = 0;
        snprintf(path, sizeof path, "/modules/%s", line);
        int fd = open(path, O_RDONLY);
        if (fd < 0 || syscall(SYS_finit_module, fd, "", 0)) printf("module %s: %m\n", line);
        if (fd >= 0) close(fd);
    }
}

static void network(void) {
    int s = socket(AF_INET, SOCK_DGRAM, 0);
    struct ifreq r = {0};
    struct sockaddr_in *a = (struct sockaddr_in *)&r.ifr_addr;
    strcpy(r.ifr_name, "eth0");
    a->sin_family = AF_INET;
    a->sin_addr.s_addr = inet_addr("169.254.77.2");
    if (ioctl(s, SIOCSIFADDR, &r)) printf("address: %m\n");
    a->sin_addr.s_addr = inet_addr("255.255.255.252");
    ioctl(s, SIOCSIFNETMASK, &r);
    ioctl(s, SIOCGIFFLAGS, &r);
    r.ifr_flags |= IFF_UP;
    if (ioctl(s, SIOCSIFFLAGS, &r)) printf("up: %m\n");
    close(s);
}

static uint64_t *disk_buffer(void) {
    static void *b;
    if (!b && posix_memalign(&b, 4096, MIB)) abort();
    return b;
}

static void answer(char *line, char *out, size_t size, volatile uint64_t *count) {
    unsigned long a = 0, b = 0;
    if (!strncmp(line, "ping", 4)) {
        snprintf(out, size, "pong\n");
    } else if (!strncmp(line, "count", 5)) {
        snprintf(out, size, "%lu\n", *count);
    } else if (sscanf(line, "fill %lu %lu", &a, &b) == 2) {
        if (memory) munmap(memory, words * 8);
        words = a * MIB / 8;
        memory = mmap(0, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        pattern(memory, words, b);
        snprintf(out, size, "%016lx\n", hash(memory, words));
    } else if (!strncmp(line, "sum", 3)) {
        snprintf(out, size, "%016lx\n", hash(memory, words));
    } else if (!strncmp(line, "zero", 4)) {
        memset(memory, 0, words * 8);
        snprintf(out, size, "%016lx\n", hash(memory, words));
    } else if (sscanf(line, "dwrite %lu %lu", &a, &b) == 2) {
        uint64_t *p = disk_buffer();
        int fd = open("/dev/vda", O_RDWR | O_DIRECT);
        pattern(p, MIB / 8, b);
        if (fd < 0 || pwrite(fd, p, MIB, a * MIB) != (ssize_t)MIB || fsync(fd)) {
            snprintf(out, size, "error %m\n");
        } else {
            snprintf(out, size, "%016lx\n", hash(p, MIB / 8));
        }
        if (fd >= 0) close(fd);
    } else if (sscanf(line, "dsum %lu", &a) == 1) {
        uint64_t *p = disk_buffer();
        int fd = open("/dev/vda", O_RDONLY | O_DIRECT);
        if (fd < 0 || pread(fd, p, MIB, a * MIB) != (ssize_t)MIB) {
            snprintf(out, size, "error %m\n");
        } else {
            snprintf(out, size, "%016lx\n", hash(p, MIB / 8));
        }
        if (fd >= 0) close(fd);
    } else if (sscanf(line, "spin %lu", &a) == 1) {
        struct timespec t0, t1;
        volatile uint64_t x = 1;
        clock_gettime(CLOCK_MONOTONIC, &t0);
        for (unsigned long i = 0; i < a; i++) x = x * 6364136223846793005UL + 1;
        clock_gettime(CLOCK_MONOTONIC, &t1);
        snprintf(out, size, "%ld\n", (t1.tv_sec - t0.tv_sec) * 1000000000L + t1.tv_nsec - t0.tv_nsec);
    } else if (!strncmp(line, "reseeds", 7)) {
        static char log[1 << 20];
        int n = klogctl(3, log, sizeof log - 1), found = 0; /* SYSLOG_ACTION_READ_ALL */
        for (char *at = log; n > 0 && (at = strstr(at, "due to virtual machine fork")); at++) found++;
        snprintf(out, size, "%d\n", found);
    } else if (!strncmp(line, "dsize", 5)) {
        unsigned long long bytes = 0;
        int fd = open("/dev/vda", O_RDONLY);
        if (fd < 0 || ioctl(fd, 0x80081272, &bytes)) bytes = 0; /* BLKGETSIZE64 */
        if (fd >= 0) close(fd);
        snprintf(out, size, "%llu\n", bytes);
    } else if (!strncmp(line, "release", 7)) {
        if (memory) munmap(memory, words * 8);
        memory = 0, words = 0;
        snprintf(out, size, "released\n");
    } else if (!strncmp(line, "cmdline", 7)) {
        FILE *f = fopen("/proc/cmdline", "r");
        if (!f || !fgets(out, size, f)) snprintf(out, size, "error\n");
        if (f) fclose(f);
    } else {
        snprintf(out, size, "what?\n");
    }
}

int main(void) {
    mkdir("/proc", 0755); mkdir("/sys", 0755); mkdir("/dev", 0755);
    mount("proc", "/proc", "proc", 0, 0);
    mount("sysfs", "/sys", "sysfs", 0, 0);
    mount("devtmpfs", "/dev", "devtmpfs", 0, 0);
    setvbuf(stdout, 0, _IONBF, 0);
    load_modules();
    network();

    volatile uint64_t *count = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!fork()) {
        for (;;) {
            struct timespec t = {0, 10000000};
            nanosleep(&t, 0);
            ++*count;
        }
    }

    int s = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(7000)};
    setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(s, (struct sockaddr *)&a, sizeof a) || listen(s, 16)) printf("listen: %m\n");
    printf("test guest is up\n");
    for (;;) {
        int c = accept(s, 0, 0);
        if (c < 0) continue;
        FILE *f = fdopen(c, "r");
        char line[256], out[1024];
        if (fgets(line, sizeof line, f)) {
            answer(line, out, sizeof out, count);
            if (write(c, out, strlen(out)) < 0) printf("answer: %m\n");
        }
        fclose(f);
    }
}
