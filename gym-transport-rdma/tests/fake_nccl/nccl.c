/* One library that answers as libnccl.so.2 and as libcuda.so.1, without a GPU, for tests only.
 *
 * Host memory stands for device memory, a thread for a stream, and a file in /dev/shm for the network between ranks. A device pointer
 * carries a tag, so that a host access faults as it does beside a real GPU. All types and operations of NCCL that the SDK uses are there.
 * Values are added in the order of gym_core::group::collective::reduction, in f32 for 16-bit floats, so that results can be compared.
 *
 *   FAKE_NCCL_VERSION=21903     the code of ncclGetVersion [default: 23203]
 *   FAKE_NCCL_FAIL=3:2          the third operation of this process fails with code 2
 *   FAKE_NCCL_ASYNC=3:2         the third operation of this process runs, and then an asynchronous error 2 is there
 *   FAKE_NCCL_DEVICES=0         number of GPUs [default: 8]
 *   FAKE_NCCL_OWN_DEVICES=1     the GPUs of each process are others, as where CUDA_VISIBLE_DEVICES gives each rank its own
 *   FAKE_NCCL_ABORT_HANGS=1     ncclCommAbort does not return
 *   FAKE_NCCL_LEAKS=1           ncclCommAbort keeps 1 GiB of the GPU's memory
 *   FAKE_NCCL_ANY_MAGIC=1       ncclCommInitRankConfig takes a configuration with any magic
 *   FAKE_NCCL_WRONG=3           the third operation of this process leaves a wrong byte
 *   FAKE_NCCL_RANK=1            all of the above for the process with RANK=1 only
 *   NCCL_SOCKET_IFNAME=eth9     an interface that is not there: ncclGetUniqueId fails as NCCL does
 *
 * A rank that dies or differs makes the others wait for ever, as NCCL's own transports over shared memory and NVLink do.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <net/if.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define TAG 0x5a00000000000000ull
#define RANKS 8
#define SLOT (1u << 20)
#define PAGE 4096
#define IN_PROGRESS 7

typedef uint64_t address;

static void *host(address device) { return (void *)(device & ~TAG); }
static void pause_us(long us) {
  struct timespec time = {0, us * 1000};
  nanosleep(&time, NULL);
}
/* A variable of this library, if it is for this process. */
static const char *variable(const char *name) {
  const char *only = getenv("FAKE_NCCL_RANK"), *rank = getenv("RANK");
  return only && (!rank || strcmp(only, rank)) ? NULL : getenv(name);
}
static long setting(const char *name, long otherwise) {
  const char *text = variable(name);
  return text && *text ? strtol(text, NULL, 10) : otherwise;
}

/* ---- CUDA ---- */

typedef struct job {
  void (*run)(void *);
  void *argument;
  struct job *next;
} job;
typedef struct {
  pthread_mutex_t lock;
  pthread_cond_t wake;
  job *first, *last;
  uint64_t pushed, done;
} stream;
typedef struct {
  stream *on;
  uint64_t after;
} event;

static void *work(void *argument) {
  stream *s = argument;
  for (;;) {
    pthread_mutex_lock(&s->lock);
    while (!s->first) pthread_cond_wait(&s->wake, &s->lock);
    job *next = s->first;
    s->first = next->next;
    if (!s->first) s->last = NULL;
    pthread_mutex_unlock(&s->lock);
    next->run(next->argument);
    free(next);
    pthread_mutex_lock(&s->lock);
    s->done++;
    pthread_mutex_unlock(&s->lock);
  }
  return NULL;
}
static void push(stream *s, void (*run)(void *), void *argument) {
  job *new = malloc(sizeof *new);
  *new = (job){run, argument, NULL};
  pthread_mutex_lock(&s->lock);
  if (s->last) s->last->next = new;
  else s->first = new;
  s->last = new;
  s->pushed++;
  pthread_cond_signal(&s->wake);
  pthread_mutex_unlock(&s->lock);
}

int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDriverGetVersion(int *version) { return *version = 13000, 0; }
int cuDeviceGetCount(int *count) { return *count = (int)setting("FAKE_NCCL_DEVICES", 8), 0; }
int cuDeviceGet(int *device, int index) {
  if (index < 0 || index >= setting("FAKE_NCCL_DEVICES", 8)) return 101;
  return *device = index, 0;
}
int cuDeviceGetUuid_v2(char *uuid, int device) {
  memset(uuid, 0, 16);
  int process = getenv("FAKE_NCCL_OWN_DEVICES") ? getpid() : 0;
  memcpy(uuid, &device, sizeof device);
  memcpy(uuid + sizeof device, &process, sizeof process);
  return 0;
}
int cuDeviceGetName(char *name, int length, int device) { return (void)device, snprintf(name, (size_t)length, "fake GPU"), 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(uintptr_t)(device + 1), 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 201; }
/* Bytes that this process has allocated. */
static _Atomic size_t used;
int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return *total = (size_t)16 << 30, *free_bytes = *total - atomic_load(&used), 0; }
int cuMemAlloc_v2(address *memory, size_t bytes) {
  void *allocated = bytes ? malloc(bytes) : NULL;
  if (!allocated) return bytes ? 2 : 1;
  atomic_fetch_add(&used, malloc_usable_size(allocated));
  return *memory = (address)allocated | TAG, 0;
}
int cuMemFree_v2(address memory) {
  atomic_fetch_sub(&used, malloc_usable_size(host(memory)));
  return free(host(memory)), 0;
}
int cuStreamCreate(stream **created, unsigned flags) {
  (void)flags;
  stream *s = calloc(1, sizeof *s);
  pthread_mutex_init(&s->lock, NULL);
  pthread_cond_init(&s->wake, NULL);
  pthread_t thread;
  if (pthread_create(&thread, NULL, work, s)) return 2;
  pthread_detach(thread);
  return *created = s, 0;
}
/* Its thread and its memory stay: the library is for short processes. */
int cuStreamDestroy_v2(stream *s) { return s ? 0 : 400; }
int cuEventCreate(event **created, unsigned flags) { return (void)flags, *created = calloc(1, sizeof(event)), 0; }
int cuEventDestroy_v2(event *e) { return free(e), 0; }
int cuEventRecord(event *e, stream *s) {
  pthread_mutex_lock(&s->lock);
  *e = (event){s, s->pushed};
  pthread_mutex_unlock(&s->lock);
  return 0;
}
int cuEventQuery(event *e) {
  if (!e->on) return 0;
  pthread_mutex_lock(&e->on->lock);
  int pending = e->on->done < e->after;
  pthread_mutex_unlock(&e->on->lock);
  return pending ? 600 : 0;
}
int cuGetErrorString(int code, const char **text) {
  *text = code == 2 ? "out of memory" : code == 101 ? "invalid device ordinal" : "unknown error";
  return 0;
}
int cuMemcpyHtoD_v2(address to, const void *from, size_t bytes) { return memcpy(host(to), from, bytes), 0; }
int cuMemcpyDtoD_v2(address to, address from, size_t bytes) { return memcpy(host(to), host(from), bytes), 0; }
int cuMemcpyDtoH_v2(void *to, address from, size_t bytes) { return memcpy(to, host(from), bytes), 0; }

/* What cudarc calls in addition. Copies wait for nothing, because nothing of this library writes to a stream's memory before it is asked to. */
int cuDeviceGetAttribute(int *value, int attribute, int device) { return (void)attribute, (void)device, *value = 0, 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, 0; }
int cuCtxGetCurrent(void **context) { return *context = NULL, 0; }
int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, stream *s) { return (void)s, cuMemcpyHtoD_v2(to, from, bytes); }
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, stream *s) { return (void)s, cuMemcpyDtoH_v2(to, from, bytes); }
int cuStreamSynchronize(stream *s) { return (void)s, 0; }

/* ---- NCCL ---- */

typedef struct {
  char internal[128];
} unique_id;
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking;
} config;
/* What ranks share. A pair of ranks has a box of its own for sends. */
typedef struct {
  _Atomic unsigned pids[RANKS];
  _Atomic uint64_t arrived[RANKS];
  struct {
    _Atomic uint64_t sent, taken;
  } boxes[RANKS][RANKS];
} head;
typedef struct {
  char *base, path[160];
  int rank, world;
  _Atomic int error, aborted;
  uint64_t met;
} comm;

static _Thread_local char last[256];
static _Atomic long operations;
static int fail(int code, const char *why) {
  snprintf(last, sizeof last, "%s", why);
  const char *level = getenv("NCCL_DEBUG");
  if (level && *level) printf("fake:%d NCCL WARN %s\n", getpid(), why);
  return code;
}
static head *head_of(const comm *c) { return (head *)c->base; }
static char *slot(const comm *c, int rank) { return c->base + 2 * PAGE + (size_t)rank * SLOT; }
static char *box(const comm *c, int from, int to) {
  return c->base + 2 * PAGE + ((size_t)RANKS + (size_t)from * RANKS + (size_t)to) * SLOT;
}

static int meet(comm *c) {
  atomic_store(&head_of(c)->arrived[c->rank], ++c->met);
  for (int rank = 0; rank < c->world; rank++)
    while (atomic_load(&head_of(c)->arrived[rank]) < c->met) {
      if (atomic_load(&c->aborted)) return 0;
      pause_us(20);
    }
  return 1;
}

int ncclGetVersion(int *version) { return *version = (int)setting("FAKE_NCCL_VERSION", 23203), 0; }
const char *ncclGetErrorString(int code) {
  static const char *texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
  return code >= 0 && code < 8 ? texts[code] : "unknown result code";
}
const char *ncclGetLastError(const comm *c) { return (void)c, last; }

/* Also an address, where the versions since 2.14 have one: 127.0.0.1. The rest is a name of its own. */
int ncclGetUniqueId(unique_id *id) {
  const char *interface = getenv("NCCL_SOCKET_IFNAME");
  if (interface && *interface && !if_nametoindex(interface)) return fail(5, "Bootstrap : no socket interface found");
  struct sockaddr_in place = {.sin_family = AF_INET, .sin_port = htons(40000), .sin_addr = {htonl(INADDR_LOOPBACK)}};
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  memset(id, 0, sizeof *id);
  memcpy(id->internal + 8, &place, sizeof place);
  snprintf(id->internal + 40, 80, "%d-%lld-%ld-%lx", getpid(), (long long)now.tv_sec, now.tv_nsec, random());
  return 0;
}

static void *join(void *argument) {
  comm *c = argument;
  int met = meet(c), expected = IN_PROGRESS;
  if (met) atomic_compare_exchange_strong(&c->error, &expected, 0);
  unlink(c->path);
  return NULL;
}
int ncclCommInitRankConfig(comm **created, int world, unique_id id, int rank, config *wanted) {
  if (setting("FAKE_NCCL_DEVICES", 8) == 0) return fail(1, "CUDA driver version is insufficient for CUDA runtime version");
  if (!wanted || (wanted->magic != 0xcafebeef && !setting("FAKE_NCCL_ANY_MAGIC", 0)) || wanted->size < 24) return fail(4, "config is not initialized");
  if (world < 1 || world > RANKS || rank < 0 || rank >= world) return fail(4, "invalid rank or world size");
  comm *c = calloc(1, sizeof *c);
  *c = (comm){.rank = rank, .world = world, .error = IN_PROGRESS};
  snprintf(c->path, sizeof c->path, "/dev/shm/gym-fake-nccl-%.80s", id.internal + 40);
  int file = open(c->path, O_RDWR | O_CREAT, 0600);
  size_t size = 2 * PAGE + (size_t)(RANKS + RANKS * RANKS) * SLOT;
  if (file < 0 || ftruncate(file, (off_t)size)) return fail(2, strerror(errno));
  c->base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (c->base == MAP_FAILED) return fail(2, strerror(errno));
  *created = c;
  if (atomic_exchange(&head_of(c)->pids[rank], (unsigned)getpid())) return atomic_store(&c->error, 5), fail(5, "two processes have one rank");
  pthread_t thread;
  pthread_create(&thread, NULL, join, c);
  if (wanted->blocking) return pthread_join(thread, NULL), atomic_load(&c->error);
  pthread_detach(thread);
  return IN_PROGRESS;
}
int ncclCommGetAsyncError(comm *c, int *error) {
  if (!c) return fail(4, "comm argument is NULL");
  return *error = atomic_load(&c->error), 0;
}
/* The memory stays: a stream may still look at it. */
int ncclCommAbort(comm *c) {
  if (!c) return 0;
  while (setting("FAKE_NCCL_ABORT_HANGS", 0)) pause_us(100000);
  if (setting("FAKE_NCCL_LEAKS", 0)) atomic_fetch_add(&used, (size_t)1 << 30);
  atomic_store(&c->aborted, 1);
  /* The ranks have not met, and this process may end before its thread sees it. */
  if (atomic_load(&c->error) == IN_PROGRESS) unlink(c->path);
  return 0;
}
int ncclCommFinalize(comm *c) { return c ? 0 : fail(4, "comm argument is NULL"); }
int ncclCommDestroy(comm *c) { return ncclCommAbort(c); }

enum { SUM, PROD, MAX, MIN, AVG };
static size_t width(int type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return widths[type];
}
static float bits(uint32_t value) {
  float f;
  memcpy(&f, &value, 4);
  return f;
}
static float half(uint16_t h) {
  uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = (h >> 10) & 31, mantissa = h & 1023u;
  if (exponent == 31) return bits(sign | 0x7f800000u | mantissa << 13);
  float value = exponent ? bits((exponent + 112) << 23 | mantissa << 13) : (float)mantissa / 16777216.0f;
  return sign ? -value : value;
}
static double value(int type, const void *at, size_t i) {
  switch (type) {
  case 0: return ((const int8_t *)at)[i];
  case 1: return ((const uint8_t *)at)[i];
  case 2: return ((const int32_t *)at)[i];
  case 3: return ((const uint32_t *)at)[i];
  case 6: return (double)half(((const uint16_t *)at)[i]);
  case 7: return (double)((const float *)at)[i];
  case 8: return ((const double *)at)[i];
  case 9: return (double)bits((uint32_t)((const uint16_t *)at)[i] << 16);
  default: return 0;
  }
}
static uint16_t to_bf16(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  if (f != f) return (uint16_t)(u >> 16 | 64);
  return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static uint16_t to_half(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
  u &= 0x7fffffff;
  if (u > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (u >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (u < 0x38800000) {
    /* Below the normal numbers: rounded to a multiple of 2^-24 by an addition. */
    float magnitude = bits(u) + 0.5f;
    uint32_t rounded;
    memcpy(&rounded, &magnitude, 4);
    return (uint16_t)(sign | (uint16_t)(rounded - 0x3f000000u));
  }
  return (uint16_t)(sign | (uint16_t)((u - 0x38000000u + 0xfff + (u >> 13 & 1)) >> 13));
}
static void set(int type, void *at, size_t i, double d) {
  switch (type) {
  case 0: ((int8_t *)at)[i] = (int8_t)(int64_t)d; break;
  case 1: ((uint8_t *)at)[i] = (uint8_t)(int64_t)d; break;
  case 2: ((int32_t *)at)[i] = (int32_t)(int64_t)d; break;
  case 3: ((uint32_t *)at)[i] = (uint32_t)(int64_t)d; break;
  case 6: ((uint16_t *)at)[i] = to_half((float)d); break;
  case 7: ((float *)at)[i] = (float)d; break;
  case 8: ((double *)at)[i] = d; break;
  case 9: ((uint16_t *)at)[i] = to_bf16((float)d); break;
  }
}
static uint64_t joined64(int signed_, int op, uint64_t a, uint64_t b) {
  int less = signed_ ? (int64_t)b < (int64_t)a : b < a;
  return op == SUM ? a + b : op == MAX ? (less ? a : b) : (less ? b : a);
}
/* Joins one element of all ranks, from the one after its owner to the owner. */
static void reduce(comm *c, int type, int op, int owner, size_t at, void *to, size_t i) {
  int first = (owner + 1) % c->world;
  if (type == 4 || type == 5) {
    uint64_t sum = ((uint64_t *)slot(c, first))[at];
    for (int step = 1; step < c->world; step++) sum = joined64(type == 4, op, sum, ((uint64_t *)slot(c, (first + step) % c->world))[at]);
    ((uint64_t *)to)[i] = sum;
    return;
  }
  double sum = value(type, slot(c, first), at);
  for (int step = 1; step < c->world; step++) {
    double next = value(type, slot(c, (first + step) % c->world), at);
    if (op == SUM || op == AVG) sum = type == 8 || type < 6 ? sum + next : (double)((float)sum + (float)next);
    else if (next != next || (sum == sum && (op == MAX ? next > sum : next < sum))) sum = next;
  }
  if (op == AVG) sum = type == 8 ? sum / c->world : (double)((float)sum / (float)c->world);
  set(type, to, i, sum);
}

enum { ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, REDUCE, SEND, RECEIVE };
typedef struct {
  comm *c;
  int kind, type, op, peer, asynchronous, wrong;
  char *from, *to;
  size_t count;
} operation;

static void pair(operation *o) {
  comm *c = o->c;
  int from = o->kind == SEND ? c->rank : o->peer, to = o->kind == SEND ? o->peer : c->rank;
  size_t bytes = o->count * width(o->type);
  for (size_t at = 0; at < bytes || !at; at += SLOT) {
    size_t part = bytes - at < SLOT ? bytes - at : SLOT;
    _Atomic uint64_t *sent = &head_of(c)->boxes[from][to].sent, *taken = &head_of(c)->boxes[from][to].taken;
    while ((o->kind == SEND) == (atomic_load(sent) > atomic_load(taken))) {
      if (atomic_load(&c->aborted)) return;
      pause_us(20);
    }
    if (o->kind == SEND) memcpy(box(c, from, to), o->from + at, part), atomic_fetch_add(sent, 1);
    else memcpy(o->to + at, box(c, from, to), part), atomic_fetch_add(taken, 1);
  }
}
/* The rank whose slice has an element: slice i of w is [i n/w, (i+1) n/w). */
static int owner(size_t element, size_t elements, int world) {
  int i = (int)((element * (size_t)world) / (elements ? elements : 1));
  while (i + 1 < world && (size_t)(i + 1) * elements / (size_t)world <= element) i++;
  while (i > 0 && (size_t)i * elements / (size_t)world > element) i--;
  return i;
}
static void together(operation *o) {
  comm *c = o->c;
  size_t each = width(o->type), total = o->count * each * (o->kind == REDUCE_SCATTER ? (size_t)c->world : 1);
  for (size_t at = 0; at < total || !at; at += SLOT) {
    size_t part = total - at < SLOT ? total - at : SLOT;
    if (o->kind != BROADCAST || o->peer == c->rank) memcpy(slot(c, c->rank), o->from + at, part);
    if (!meet(c)) return;
    switch (o->kind) {
    case ALL_REDUCE:
      for (size_t i = 0; i < part / each; i++) reduce(c, o->type, o->op, owner(at / each + i, o->count, c->world), i, o->to + at, i);
      break;
    case BROADCAST: memcpy(o->to + at, slot(c, o->peer), part); break;
    case ALL_GATHER:
      for (int rank = 0; rank < c->world; rank++) memcpy(o->to + (size_t)rank * total + at, slot(c, rank), part);
      break;
    case REDUCE_SCATTER:
      for (size_t i = 0; i < part / each; i++) {
        size_t element = at / each + i;
        if (element / o->count == (size_t)c->rank) reduce(c, o->type, o->op, c->rank, i, o->to, element % o->count);
      }
      break;
    case REDUCE:
      for (size_t i = 0; i < part / each && c->rank == o->peer; i++) reduce(c, o->type, o->op, c->rank, i, o->to, at / each + i);
    }
    if (!meet(c)) return;
  }
}
static void run(void *argument) {
  operation *o = argument;
  if (o->kind >= SEND) pair(o);
  else together(o);
  if (o->wrong) o->to[0] ^= 1;
  if (o->asynchronous) atomic_store(&o->c->error, o->asynchronous);
  free(o);
}
/* `number:code` of a variable, if the number is that of this operation. */
static int injected(const char *name, long number) {
  const char *text = variable(name);
  char *rest;
  if (!text || strtol(text, &rest, 10) != number || *rest != ':') return 0;
  return (int)strtol(rest + 1, NULL, 10);
}
static int start(operation new, address from, address to, stream *s) {
  if (!new.c) return fail(4, "comm argument is NULL");
  if (new.type < 0 || new.type > 9) return fail(4, "invalid type");
  long number = atomic_fetch_add(&operations, 1) + 1;
  int code = injected("FAKE_NCCL_FAIL", number);
  if (code) return fail(code, "injected");
  new.asynchronous = injected("FAKE_NCCL_ASYNC", number);
  new.wrong = number == setting("FAKE_NCCL_WRONG", 0);
  new.from = host(from), new.to = host(to);
  operation *o = malloc(sizeof *o);
  *o = new;
  push(s, run, o);
  return 0;
}
int ncclAllReduce(address from, address to, size_t count, int type, int op, comm *c, stream *s) {
  return start((operation){.c = c, .kind = ALL_REDUCE, .type = type, .op = op, .count = count}, from, to, s);
}
int ncclBroadcast(address from, address to, size_t count, int type, int root, comm *c, stream *s) {
  return start((operation){.c = c, .kind = BROADCAST, .type = type, .peer = root, .count = count}, from, to, s);
}
int ncclAllGather(address from, address to, size_t count, int type, comm *c, stream *s) {
  return start((operation){.c = c, .kind = ALL_GATHER, .type = type, .count = count}, from, to, s);
}
int ncclReduceScatter(address from, address to, size_t count, int type, int op, comm *c, stream *s) {
  return start((operation){.c = c, .kind = REDUCE_SCATTER, .type = type, .op = op, .count = count}, from, to, s);
}
int ncclReduce(address from, address to, size_t count, int type, int op, int root, comm *c, stream *s) {
  return start((operation){.c = c, .kind = REDUCE, .type = type, .op = op, .peer = root, .count = count}, from, to, s);
}
int ncclSend(address from, size_t count, int type, int peer, comm *c, stream *s) {
  return start((operation){.c = c, .kind = SEND, .type = type, .peer = peer, .count = count}, from, from, s);
}
int ncclRecv(address to, size_t count, int type, int peer, comm *c, stream *s) {
  return start((operation){.c = c, .kind = RECEIVE, .type = type, .peer = peer, .count = count}, to, to, s);
}
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 0; }
