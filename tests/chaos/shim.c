/* Preloaded into services: their wall clock jumps, and names of theirs resolve, as files in CHAOS_FOLDER say.
 *
 * clock.PID: seconds (int64) added to the wall clock. gRPC's own library keeps the real one where it waits: the kernel
 * measures its waits by that. NAME.hosts, of names that end in ".chaos": addresses with spaces between; none: no answer.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *jump;
static int64_t none;

__attribute__((constructor)) static void begin(void) {
  const char *folder = getenv("CHAOS_FOLDER");
  char path[4096];
  jump = &none;
  if (!folder) return;
  snprintf(path, sizeof path, "%s/clock.%d", folder, (int)getpid());
  int file = open(path, O_RDWR | O_CREAT, 0600);
  if (file < 0) return;
  if (ftruncate(file, sizeof *jump) == 0) {
    void *shared = mmap(NULL, sizeof *jump, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared != MAP_FAILED) jump = shared;
  }
  close(file);
}

static int of_grpc(void *caller) {
  Dl_info info;
  return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "cygrpc");
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, now);
  if (clock == CLOCK_REALTIME && *jump && !of_grpc(__builtin_return_address(0))) now->tv_sec += *jump;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  static int (*real)(struct timeval *, void *);
  if (!real) real = dlsym(RTLD_NEXT, "gettimeofday");
  int result = real(now, zone);
  if (now) now->tv_sec += *jump;
  return result;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
  static int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
  if (!real) real = dlsym(RTLD_NEXT, "getaddrinfo");
  const char *folder = getenv("CHAOS_FOLDER"), *end = node ? strrchr(node, '.') : NULL;
  if (!folder || !end || strcmp(end, ".chaos")) return real(node, service, hints, found);
  char path[4096], line[4096] = "", *rest = line, *address;
  snprintf(path, sizeof path, "%s/%s.hosts", folder, node);
  FILE *file = fopen(path, "r");
  if (file) {
    if (!fgets(line, sizeof line, file)) line[0] = 0;
    fclose(file);
  }
  struct addrinfo **last = found;
  *found = NULL;
  while ((address = strsep(&rest, " \n"))) {
    if (*address && real(address, service, hints, last) == 0)
      while (*last) last = &(*last)->ai_next;
  }
  return *found ? 0 : EAI_AGAIN;
}
