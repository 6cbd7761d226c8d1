/* Ranks that have NCCL and nothing else: what they learn of one that is killed or stopped. For the figures beside those of the SDK.
 *
 *   alone KILL|STOP ROUNDS DEADLINE_MS      4 ranks in processes sum again and again; one of them gets the signal
 *
 * As in the watchdogs that use NCCL, a rank looks at its event and at the asynchronous error until the deadline of its operation, and aborts then.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANKS 4
#define IN_PROGRESS 7
#define NOT_READY 600

typedef struct {
  char internal[128];
} unique_id;
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga, min, max;
  const char *net;
  int split;
} config;
int cuInit(unsigned), cuDeviceGet(int *, int), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
int cuMemAlloc_v2(uint64_t *, size_t), cuStreamCreate(void **, unsigned), cuEventCreate(void **, unsigned), cuEventRecord(void *, void *), cuEventQuery(void *);
int ncclGetUniqueId(unique_id *), ncclCommInitRankConfig(void **, int, unique_id, int, config *), ncclCommGetAsyncError(void *, int *), ncclCommAbort(void *);
int ncclAllReduce(uint64_t, uint64_t, size_t, int, int, void *, void *);

typedef struct {
  double at;
  int error;
} told;

static double ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}
static void pause_us(long us) { nanosleep(&(struct timespec){us / 1000000, us % 1000000 * 1000}, NULL); }

static void rank(int position, unique_id id, double deadline, int ready, int report) {
  config wanted = {sizeof wanted, 0xcafebeef, 21703, 0, INT32_MIN, INT32_MIN, INT32_MIN, NULL, INT32_MIN};
  void *context, *stream, *comm, *event;
  uint64_t memory;
  int device, error = 0;
  if (cuInit(0) || cuDeviceGet(&device, position) || cuDevicePrimaryCtxRetain(&context, device) || cuCtxSetCurrent(context)) _exit(2);
  if (cuMemAlloc_v2(&memory, 64) || cuStreamCreate(&stream, 1) || cuEventCreate(&event, 2)) _exit(2);
  int code = ncclCommInitRankConfig(&comm, RANKS, id, position, &wanted);
  if (code && code != IN_PROGRESS) _exit(3);
  while (!ncclCommGetAsyncError(comm, &error) && error == IN_PROGRESS) pause_us(100);
  for (int operation = 0;; operation++) {
    double began = ms();
    ncclAllReduce(memory, memory, 16, 7, 0, comm, stream);
    cuEventRecord(event, stream);
    while (cuEventQuery(event) == NOT_READY) {
      ncclCommGetAsyncError(comm, &error);
      if ((error && error != IN_PROGRESS) || ms() - began > deadline) {
        told last = {ms(), error == IN_PROGRESS ? 0 : error};
        ncclCommAbort(comm);
        if (write(report, &last, sizeof last) != sizeof last) _exit(4);
        _exit(0);
      }
      pause_us(100);
    }
    if (operation == 10 && write(ready, "r", 1) != 1) _exit(4);
  }
}

static int ascending(const void *a, const void *b) { return *(const double *)a < *(const double *)b ? -1 : 1; }

int main(int count, char **arguments) {
  if (count != 4) return 2;
  int rounds = atoi(arguments[2]), signalled = strcmp(arguments[1], "STOP") ? SIGKILL : SIGSTOP, errors = 0, left = 0;
  double deadline = atof(arguments[3]), *times = calloc((size_t)rounds * RANKS + 1, sizeof *times);
  for (int round = 0; round < rounds; round++) {
    unique_id id;
    int ready[2], report[2], pids[RANKS];
    if (ncclGetUniqueId(&id) || pipe(ready) || pipe(report)) return 3;
    for (int position = 0; position < RANKS; position++)
      if (!(pids[position] = fork())) rank(position, id, deadline, ready[1], report[1]);
    char byte;
    for (int position = 0; position < RANKS; position++)
      if (read(ready[0], &byte, 1) != 1) return 4;
    int lost = round % RANKS;
    pause_us(1000 + round * 7919 % 59000);
    double at = ms();
    kill(pids[lost], signalled);
    for (int survivor = 0; survivor < RANKS - 1; survivor++) {
      told last;
      if (read(report[0], &last, sizeof last) != sizeof last) return 5;
      times[left++] = last.at - at;
      errors += last.error != 0;
    }
    kill(pids[lost], SIGKILL);
    for (int position = 0; position < RANKS; position++) waitpid(pids[position], NULL, 0);
    for (int end = 0; end < 2; end++) close(ready[end]), close(report[end]);
  }
  qsort(times, (size_t)left, sizeof *times, ascending);
  printf("%d of %s, deadline %.0f ms, NCCL alone: %d survivors failed after %.1f ms (p50), %.1f ms (p99); %d had an error of NCCL, none the name of a rank\n", rounds, arguments[1], deadline, left, times[(left - 1) / 2], times[(left - 1) * 99 / 100], errors);
  return 0;
}
