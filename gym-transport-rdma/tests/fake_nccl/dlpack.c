/* A library that gives and takes tensors by DLPack, for tests only. The structures are those of dlpack.h 1.1, so that C's layout is compared with ours. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
  void *data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} tensor;
typedef struct managed {
  tensor tensor;
  void *context;
  void (*deleter)(struct managed *);
} managed;
typedef struct versioned {
  struct {
    uint32_t major, minor;
  } version;
  void *context;
  void (*deleter)(struct versioned *);
  uint64_t flags;
  tensor tensor;
} versioned;

static _Atomic int deleted;
int deletions(void) { return atomic_load(&deleted); }

/* What a deleter overwrites must not be read any more. */
static void delete_managed(managed *self) {
  atomic_fetch_add(&deleted, 1);
  free(self->context);
  memset(self, 0xee, sizeof *self);
  free(self);
}
static void delete_versioned(versioned *self) {
  atomic_fetch_add(&deleted, 1);
  free(self->context);
  memset(self, 0xee, sizeof *self);
  free(self);
}

/* Returns a tensor; sizes and strides are copied, if they are there. */
managed *give(const tensor *of, int deletes) {
  managed *new = malloc(sizeof *new);
  size_t count = of->ndim > 0 ? (size_t)of->ndim : 0;
  int64_t *both = calloc(2 * count + 1, sizeof *both);
  *new = (managed){*of, both, deletes ? delete_managed : NULL};
  if (of->shape) new->tensor.shape = memcpy(both, of->shape, count * sizeof *both);
  if (of->strides) new->tensor.strides = memcpy(both + count, of->strides, count * sizeof *both);
  return new;
}
versioned *give_versioned(const tensor *of, int deletes, uint32_t major, uint64_t flags) {
  managed *old = give(of, deletes);
  versioned *new = malloc(sizeof *new);
  *new = (versioned){{major, 0}, old->context, deletes ? delete_versioned : NULL, flags, old->tensor};
  free(old);
  return new;
}

static void describe(const tensor *t, char *text, size_t bytes) {
  int at = snprintf(text, bytes, "device %d:%d, dtype %d/%d/%d, offset %" PRIu64 ", data %" PRIuPTR ",", t->device.type, t->device.id, t->dtype.code,
                    t->dtype.bits, t->dtype.lanes, t->byte_offset, (uintptr_t)t->data);
  for (int i = 0; i < t->ndim; i++) at += snprintf(text + at, bytes - (size_t)at, " %" PRId64 "*%" PRId64, t->shape[i], t->strides[i]);
}
/* Describe a tensor and give it back. */
void take(managed *of, char *text, size_t bytes) {
  describe(&of->tensor, text, bytes);
  of->deleter(of);
}
void take_versioned(versioned *of, char *text, size_t bytes) {
  int at = snprintf(text, bytes, "version %u.%u, flags %" PRIu64 ", ", of->version.major, of->version.minor, of->flags);
  describe(&of->tensor, text + at, bytes - (size_t)at);
  of->deleter(of);
}
