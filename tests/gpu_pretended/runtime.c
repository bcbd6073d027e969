/* A CUDA runtime and driver for machines without a GPU: memory is the host's, copies are real, kernels do nothing.
 *
 *     torch, vLLM, Triton ---> libcudart, libcuda ---> a GPU
 *     torch, vLLM, Triton ---> this library       ---> memory of the host
 *
 * LD_PRELOADed, it takes the place of NVIDIA's libraries, so torch's CUDA build finds GPUs. Allocator, streams, events,
 * pinned memory, copies between GPUs and CUDA IPC are torch's own. What kernels would compute is computed by device.py.
 *
 * Streams and events are done at once. Memory is a memfd, which other processes open through /proc. What each process
 * holds of each GPU is noted in a file that all processes share; processes that have died hold nothing.
 *
 *     PRETENDED_GPUS=8              how many there are
 *     PRETENDED_GPU_GB=80           memory of each, in GiB
 *     PRETENDED_GPU_TABLE=FILE      who holds how much; without it, each process has all memory for itself
 *     PRETENDED_GPU_ABORTS=1        a kernel that is launched ends the process, and names the call
 */
#define _GNU_SOURCE
#define cuTensorMapEncodeTiled declared_with_its_twelve_parameters
#include <cuda.h>
#undef cuTensorMapEncodeTiled
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
/* A function that succeeds and does nothing. Its parameters need no names. */
#define NOTHING(name, ...) \
  API cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
#define DRIVER_NOTHING(name, ...) \
  API CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
/* A function that makes something and returns a handle that nobody looks into. */
#define MAKES(result, name, type, ...) \
  API result name(type *made, ##__VA_ARGS__) { *made = (type)token(); return 0; }

enum { MAX_DEVICES = 16, MAX_PROCESSES = 256, MAX_BLOCKS = 1 << 16 };

/* Of this thread, until it is asked for: torch raises it after its next kernel, whichever call it came from. */
static __thread cudaError_t last_error = cudaSuccess;
static cudaError_t fail(cudaError_t e) { return last_error = e; }

static void *token(void) {
  static uintptr_t last = 0x1000;
  return (void *)__sync_add_and_fetch(&last, 16);
}

/* --- GPUs --- */

static __thread int current = 0;

static int num_devices(void) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *count = getenv("PRETENDED_GPUS");
  int all = count ? atoi(count) : 1, named = 1;
  if (!visible) return all;
  if (!*visible) return 0;
  for (const char *c = visible; *c; c++) named += *c == ',';
  return named < all ? named : all;
}

/* The number on this machine of the n-th GPU that the process sees. */
static int physical(int device) {
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  for (; visible && device > 0 && (visible = strchr(visible, ',')); device--) visible++;
  if (!visible) return device;
  const char *digits = strncmp(visible, "GPU-", 4) ? visible : visible + 4;
  return strtol(digits, NULL, digits == visible ? 10 : 16) % MAX_DEVICES;
}

static size_t capacity(void) {
  const char *gb = getenv("PRETENDED_GPU_GB");
  return (size_t)((gb ? atof(gb) : 80.0) * (1ull << 30));
}

/* --- who holds how much of which GPU --- */

typedef struct { int pid; size_t used[MAX_DEVICES]; } Holder;
static Holder *holders, *self;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void join(void) {
  const char *path = getenv("PRETENDED_GPU_TABLE");
  size_t size = MAX_PROCESSES * sizeof(Holder);
  int file = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
  if (path && (file < 0 || ftruncate(file, size))) abort();
  holders = mmap(NULL, size, PROT_READ | PROT_WRITE, path ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS, file, 0);
  if (file >= 0) close(file);
  for (self = holders; self < holders + MAX_PROCESSES; self++) {
    int pid = self->pid;
    if (pid && !kill(pid, 0)) continue;
    if (!__sync_bool_compare_and_swap(&self->pid, pid, getpid())) continue;
    memset(self->used, 0, sizeof self->used);
    return;
  }
  abort();
}

/* This process's row. A fork has one of its own. */
static Holder *own(void) {
  static pthread_mutex_t joining = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&joining);
  if (!self || self->pid != getpid()) join();
  pthread_mutex_unlock(&joining);
  return self;
}

static size_t used_by_all(int device) {
  size_t sum = 0;
  own();
  for (Holder *each = holders; each < holders + MAX_PROCESSES; each++)
    if (each->pid && !kill(each->pid, 0)) sum += each->used[physical(device)];
  return sum;
}

static int take(int device, size_t size) {
  if (used_by_all(device) + size > capacity()) return 0;
  __sync_fetch_and_add(&own()->used[physical(device)], size);
  return 1;
}

static void give_back(int device, size_t size) { __sync_fetch_and_sub(&own()->used[physical(device)], size); }

/* --- memory --- */

enum Kind { FREE, DEVICE, HOST, REGISTERED, OPENED };
typedef struct { char *base; size_t size; int device, fd; enum Kind kind; } Block;
static Block blocks[MAX_BLOCKS];
static int num_blocks = 0;

static size_t pages(size_t size) { return size ? (size + 4095) & ~(size_t)4095 : 4096; }

static void *map(size_t size, int fd) {
  int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  return mmap(NULL, size, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
}

static Block *find(const void *p) {
  for (Block *b = blocks + num_blocks - 1; b >= blocks; b--)
    if (b->kind != FREE && (const char *)p >= b->base && (const char *)p < b->base + b->size) return b;
  return NULL;
}

static void note(void *base, size_t size, enum Kind kind, int fd) {
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < num_blocks && blocks[i].kind != FREE) i++;
  if (i == MAX_BLOCKS) abort();
  if (i == num_blocks) num_blocks++;
  blocks[i] = (Block){base, size, current, fd, kind};
  pthread_mutex_unlock(&lock);
}

static cudaError_t forget(void *p, int unmap) {
  if (!p) return cudaSuccess;
  pthread_mutex_lock(&lock);
  Block *b = find(p);
  if (b) {
    if (b->kind == DEVICE) give_back(b->device, b->size);
    if (unmap) munmap(b->base, b->size);
    if (b->fd >= 0) close(b->fd);
    b->kind = FREE;
  }
  pthread_mutex_unlock(&lock);
  return b ? cudaSuccess : fail(cudaErrorInvalidValue);
}

/* A file of this size. A limit on files that the process writes, as a full disk has, does not hold for a GPU. */
static int memory_file(size_t size) {
  struct rlimit limit;
  int fd = memfd_create("pretended-gpu", MFD_CLOEXEC);
  pthread_mutex_lock(&lock);
  getrlimit(RLIMIT_FSIZE, &limit);
  setrlimit(RLIMIT_FSIZE, &(struct rlimit){limit.rlim_max, limit.rlim_max});
  if (fd < 0 || ftruncate(fd, size)) perror("pretended GPU: no memory of the host"), abort();
  setrlimit(RLIMIT_FSIZE, &limit);
  pthread_mutex_unlock(&lock);
  return fd;
}

API cudaError_t cudaMalloc(void **p, size_t size) {
  size = pages(size);
  *p = NULL;
  if (!take(current, size)) return fail(cudaErrorMemoryAllocation);
  int fd = memory_file(size);
  *p = map(size, fd);
  note(*p, size, DEVICE, fd);
  return cudaSuccess;
}
API cudaError_t cudaFree(void *p) { return forget(p, 1); }
API cudaError_t cudaMallocAsync(void **p, size_t size, cudaStream_t) { return cudaMalloc(p, size); }
API cudaError_t cudaFreeAsync(void *p, cudaStream_t) { return cudaFree(p); }
API cudaError_t cudaHostAlloc(void **p, size_t size, unsigned) {
  *p = map(pages(size), -1);
  note(*p, pages(size), HOST, -1);
  return cudaSuccess;
}
API cudaError_t cudaMallocHost(void **p, size_t size) { return cudaHostAlloc(p, size, 0); }
API cudaError_t cudaFreeHost(void *p) { return forget(p, 1); }
API cudaError_t cudaHostRegister(void *p, size_t size, unsigned) {
  pthread_mutex_lock(&lock);
  int registered = find(p) || find((char *)p + size - 1);
  pthread_mutex_unlock(&lock);
  if (registered) return fail(cudaErrorHostMemoryAlreadyRegistered);
  note(p, size, REGISTERED, -1);
  return cudaSuccess;
}
API cudaError_t cudaHostUnregister(void *p) { return forget(p, 0); }
API cudaError_t cudaHostGetDevicePointer(void **on_device, void *on_host, unsigned) {
  *on_device = on_host;
  return cudaSuccess;
}
API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  pthread_mutex_lock(&lock);
  Block *b = find(p);
  int on_device = b && (b->kind == DEVICE || b->kind == OPENED);
  a->type = !b ? cudaMemoryTypeUnregistered : on_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  a->device = b ? b->device : 0;
  a->devicePointer = b ? (void *)p : NULL;
  a->hostPointer = b && !on_device ? (void *)p : NULL;
  pthread_mutex_unlock(&lock);
  return cudaSuccess;
}
API cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
  *total = capacity();
  *available = *total - used_by_all(current);
  return cudaSuccess;
}

static cudaError_t copy(void *to, const void *from, size_t size) {
  memmove(to, from, size);
  return cudaSuccess;
}
API cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind) { return copy(d, s, n); }
API cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind, cudaStream_t) {
  return copy(d, s, n);
}
API cudaError_t cudaMemcpyPeerAsync(void *d, int, const void *s, int, size_t n, cudaStream_t) { return copy(d, s, n); }
API cudaError_t cudaMemcpy2DAsync(void *d, size_t d_pitch, const void *s, size_t s_pitch, size_t width, size_t height,
                                  enum cudaMemcpyKind, cudaStream_t) {
  for (size_t i = 0; i < height; i++) copy((char *)d + i * d_pitch, (const char *)s + i * s_pitch, width);
  return cudaSuccess;
}
API cudaError_t cudaMemset(void *p, int value, size_t n) {
  memset(p, value, n);
  return cudaSuccess;
}
API cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t) { return cudaMemset(p, value, n); }
NOTHING(cudaMemcpyToSymbol, const void *, const void *, size_t, size_t, enum cudaMemcpyKind)
API cudaError_t cudaGetSymbolAddress(void **p, const void *symbol) {
  *p = (void *)symbol;
  return cudaSuccess;
}

/* --- CUDA IPC: a handle names the process, its file descriptor and the size --- */

typedef struct { int pid, fd; size_t size; } Handle;

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p) {
  pthread_mutex_lock(&lock);
  Block *b = find(p);
  Handle own_handle = b ? (Handle){getpid(), b->fd, b->size} : (Handle){0};
  int shared = b && b->kind == DEVICE;
  pthread_mutex_unlock(&lock);
  if (!shared) return fail(cudaErrorInvalidValue);
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &own_handle, sizeof own_handle);
  return cudaSuccess;
}
API cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned) {
  Handle theirs;
  char path[64];
  memcpy(&theirs, &handle, sizeof theirs);
  if (theirs.pid == getpid()) return fail(cudaErrorDeviceUninitialized); /* as CUDA: not a process's own memory */
  snprintf(path, sizeof path, "/proc/%d/fd/%d", theirs.pid, theirs.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return fail(cudaErrorInvalidResourceHandle);
  *p = map(theirs.size, fd);
  note(*p, theirs.size, OPENED, fd);
  return cudaSuccess;
}
API cudaError_t cudaIpcCloseMemHandle(void *p) { return forget(p, 1); }
NOTHING(cudaIpcGetEventHandle, cudaIpcEventHandle_t *, cudaEvent_t)
API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t) {
  *e = calloc(1, sizeof(struct timespec));
  return cudaSuccess;
}

/* --- properties --- */

API cudaError_t cudaGetDeviceCount(int *n) { return (*n = num_devices()) ? cudaSuccess : cudaErrorNoDevice; }
API cudaError_t cudaGetDevice(int *device) {
  *device = current;
  return cudaSuccess;
}
API cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_devices()) return fail(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}
NOTHING(cudaDeviceSynchronize, void)
NOTHING(cudaDeviceReset, void)
API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) {
  *can = 1;
  return cudaSuccess;
}
NOTHING(cudaDeviceEnablePeerAccess, int, unsigned)
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
API cudaError_t cudaDeviceGetPCIBusId(char *id, int size, int device) {
  snprintf(id, size, "0000:%02x:00.0", physical(device) + 1);
  return cudaSuccess;
}
API cudaError_t cudaDriverGetVersion(int *version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
API cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

/* Those of an H100 with 80 GB. */
API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int) {
  static const struct { int attribute, value; } known[] = {
      {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxSharedMemoryPerBlock, 49152}, {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxRegistersPerBlock, 65536}, {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMemoryClockRate, 2619000}, {cudaDevAttrGlobalMemoryBusWidth, 5120},
      {cudaDevAttrL2CacheSize, 50 << 20}, {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535}, {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMemoryPoolsSupported, 1}};
  *value = 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].attribute == (int)attribute) *value = known[i].value;
  return cudaSuccess;
}
API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "pretended NVIDIA H100 80GB HBM3");
  for (int i = 0; i < 16; i++) p->uuid.bytes[i] = i == 3 ? (char)physical(device) : 0;
  p->totalGlobalMem = capacity();
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = 9, p->minor = 0, p->multiProcessorCount = 132, p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120, p->pciBusID = physical(device) + 1;
  p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = 1;
  return cudaSuccess;
}
API cudaError_t cudaPeekAtLastError(void) { return last_error; }
API cudaError_t cudaGetLastError(void) {
  cudaError_t e = last_error;
  last_error = cudaSuccess;
  return e;
}
API const char *cudaGetErrorString(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "out of memory (of a pretended GPU)" : "an error of a pretended GPU";
}
API const char *cudaGetErrorName(cudaError_t e) {
  return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOfAPretendedGPU";
}
NOTHING(cudaProfilerStart, void)
NOTHING(cudaProfilerStop, void)

/* --- streams and events --- */

MAKES(cudaError_t, cudaStreamCreate, cudaStream_t)
MAKES(cudaError_t, cudaStreamCreateWithFlags, cudaStream_t, unsigned)
MAKES(cudaError_t, cudaStreamCreateWithPriority, cudaStream_t, unsigned, int)
NOTHING(cudaStreamDestroy, cudaStream_t)
NOTHING(cudaStreamQuery, cudaStream_t)
NOTHING(cudaStreamSynchronize, cudaStream_t)
NOTHING(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned)
API cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) {
  *priority = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t call, void *data, unsigned) {
  call(s, cudaSuccess, data);
  return cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void *data) {
  call(data);
  return cudaSuccess;
}
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) {
  *e = calloc(1, sizeof(struct timespec));
  return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t e) {
  free(e);
  return cudaSuccess;
}
NOTHING(cudaEventQuery, cudaEvent_t)
NOTHING(cudaEventSynchronize, cudaEvent_t)
API cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
  clock_gettime(CLOCK_MONOTONIC, (struct timespec *)e);
  return cudaSuccess;
}
API cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned) { return cudaEventRecord(e, s); }
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
  struct timespec *a = (void *)from, *b = (void *)to;
  *ms = (b->tv_sec - a->tv_sec) * 1e3 + (b->tv_nsec - a->tv_nsec) / 1e6;
  return cudaSuccess;
}

/* --- graphs: what is captured has run already, and a replay does nothing --- */

static __thread int capturing = 0;

static int status(void) { return capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone; }
API cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus *found) {
  *found = status();
  return cudaSuccess;
}
API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, enum cudaStreamCaptureStatus *found, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                         const cudaGraphEdgeData **edges, size_t *n) {
  *found = status();
  if (id) *id = capturing;
  if (graph) *graph = (cudaGraph_t)8;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (n) *n = 0;
  return cudaSuccess;
}
API cudaError_t cudaStreamBeginCapture(cudaStream_t, enum cudaStreamCaptureMode) {
  static int captures = 0;
  capturing = __sync_add_and_fetch(&captures, 1);
  return cudaSuccess;
}
API cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t *graph) {
  capturing = 0;
  *graph = token();
  return cudaSuccess;
}
NOTHING(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *)
MAKES(cudaError_t, cudaGraphInstantiateWithFlags, cudaGraphExec_t, cudaGraph_t, unsigned long long)
NOTHING(cudaGraphLaunch, cudaGraphExec_t, cudaStream_t)
NOTHING(cudaGraphDestroy, cudaGraph_t)
NOTHING(cudaGraphExecDestroy, cudaGraphExec_t)
API cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t *, size_t *n) {
  *n = 1;
  return cudaSuccess;
}
NOTHING(cudaGraphDebugDotPrint, cudaGraph_t, const char *, unsigned)

/* --- kernels --- */

static long launches = 0;
API long pretended_gpu_launches(void) { return launches; }

static int launched(const char *call) {
  __sync_fetch_and_add(&launches, 1);
  if (getenv("PRETENDED_GPU_ABORTS")) {
    fprintf(stderr, "pretended GPU: a kernel was launched by %s\n", call);
    abort();
  }
  return 0;
}
API cudaError_t cudaLaunchKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t) { return launched(__func__); }
API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *, const void *, void **) { return launched(__func__); }
API cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t) {
  return launched(__func__);
}
API cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}
API unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void *) { return 0; }
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = *block = (dim3){1, 1, 1};
  *shared = 0;
  *(void **)stream = NULL;
  return cudaSuccess;
}
API void **__cudaRegisterFatBinary(void *) {
  static void *handle[1];
  return handle;
}
API void __cudaRegisterFatBinaryEnd(void **) {}
API void __cudaUnregisterFatBinary(void **) {}
API char __cudaInitModule(void **) { return 1; }
API void __cudaRegisterFunction(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *) {}
API void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
API cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = 90;
  return cudaSuccess;
}
NOTHING(cudaFuncSetAttribute, const void *, enum cudaFuncAttribute, int)
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *, int, size_t, unsigned) {
  *n = 2;
  return cudaSuccess;
}
NOTHING(cudaKernelSetAttributeForDevice, cudaKernel_t, enum cudaFuncAttribute, int, int)
MAKES(cudaError_t, cudaLibraryLoadData, cudaLibrary_t, const void *, enum cudaJitOption *, void **, unsigned,
      enum cudaLibraryOption *, void **, unsigned)
MAKES(cudaError_t, cudaLibraryGetKernel, cudaKernel_t, cudaLibrary_t, const char *)
NOTHING(cudaLibraryUnload, cudaLibrary_t)
API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) {
  *pool = (cudaMemPool_t)16;
  return cudaSuccess;
}
API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, enum cudaMemPoolAttr, void *value) {
  memset(value, 0, sizeof(uint64_t));
  return cudaSuccess;
}
NOTHING(cudaMemPoolSetAttribute, cudaMemPool_t, enum cudaMemPoolAttr, void *)
NOTHING(cudaMemPoolSetAccess, cudaMemPool_t, const struct cudaMemAccessDesc *, size_t)
NOTHING(cudaMemPoolTrimTo, cudaMemPool_t, size_t)

/* --- driver --- */

static CUresult succeed(void) { return CUDA_SUCCESS; }
static void *function(const char *name) {
  void *found = dlsym(RTLD_DEFAULT, name);
  return found ? found : (void *)succeed;
}
API cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned, unsigned long long,
                                                 enum cudaDriverEntryPointQueryResult *result) {
  *found = function(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
#undef cuGetProcAddress
API CUresult cuGetProcAddress_v2(const char *name, void **found, int, cuuint64_t, CUdriverProcAddressQueryResult *result) {
  *found = function(name);
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
API CUresult cuInit(unsigned) { return num_devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
API CUresult cuDriverGetVersion(int *version) { return (CUresult)cudaDriverGetVersion(version); }
API CUresult cuDeviceGetCount(int *n) {
  *n = num_devices();
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGet(CUdevice *device, int number) {
  *device = number;
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetName(char *name, int size, CUdevice) {
  snprintf(name, size, "pretended H100");
  return CUDA_SUCCESS;
}
API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
}
/* A context is the number of its GPU. */
static CUresult context(CUcontext *c, int device) {
  *c = (CUcontext)(uintptr_t)(32 + device);
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice device) { return context(c, device); }
API CUresult cuCtxGetCurrent(CUcontext *c) { return context(c, current); }
API CUresult cuCtxSetCurrent(CUcontext c) {
  if (c) current = (uintptr_t)c - 32;
  return CUDA_SUCCESS;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetDevice(CUdevice *device) {
  *device = current;
  return CUDA_SUCCESS;
}
API CUresult cuCtxGetLimit(size_t *value, CUlimit) {
  *value = 8 << 20;
  return CUDA_SUCCESS;
}
DRIVER_NOTHING(cuCtxSetLimit, CUlimit, size_t)
API CUresult cuGetErrorString(CUresult, const char **text) {
  *text = "an error of a pretended GPU";
  return CUDA_SUCCESS;
}
API CUresult cuPointerGetAttribute(void *value, CUpointer_attribute, CUdeviceptr p) {
  *(CUdeviceptr *)value = p;
  return CUDA_SUCCESS;
}
MAKES(CUresult, cuModuleLoad, CUmodule, const char *)
MAKES(CUresult, cuModuleLoadData, CUmodule, const void *)
MAKES(CUresult, cuModuleLoadDataEx, CUmodule, const void *, unsigned, CUjit_option *, void **)
DRIVER_NOTHING(cuModuleUnload, CUmodule)
MAKES(CUresult, cuModuleGetFunction, CUfunction, CUmodule, const char *)
API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction) {
  int threads = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
  *value = threads ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return CUDA_SUCCESS;
}
DRIVER_NOTHING(cuFuncSetAttribute, CUfunction, CUfunction_attribute, int)
DRIVER_NOTHING(cuFuncSetCacheConfig, CUfunction, CUfunc_cache)
DRIVER_NOTHING(cuTensorMapEncodeTiled, CUtensorMap *)
API CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                            void **, void **) {
  return (CUresult)launched(__func__);
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **) {
  return (CUresult)launched(__func__);
}
API CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction, const CUlaunchConfig *) {
  *n = 66;
  return CUDA_SUCCESS;
}
API CUresult cuStreamGetCaptureInfo_v2(CUstream, CUstreamCaptureStatus *found, cuuint64_t *id, CUgraph *graph,
                                       const CUgraphNode **nodes, size_t *n) {
  *found = (CUstreamCaptureStatus)status();
  if (id) *id = capturing;
  if (graph) *graph = 0;
  if (nodes) *nodes = 0;
  if (n) *n = 0;
  return CUDA_SUCCESS;
}

/* --- memory by the driver, which has names with versions, and keeps no error --- */

#undef cuMemAlloc
#undef cuMemFree
#undef cuMemcpyDtoH
#undef cuMemHostRegister
#undef cuIpcOpenMemHandle
static CUresult by_driver(cudaError_t e) {
  last_error = cudaSuccess;
  return (CUresult)e;
}
API CUresult cuMemAlloc(CUdeviceptr *p, size_t size) { return by_driver(cudaMalloc((void **)p, size)); }
API CUresult cuMemFree(CUdeviceptr p) { return by_driver(cudaFree((void *)p)); }
API CUresult cuMemcpyDtoH(void *to, CUdeviceptr from, size_t size) { return by_driver(copy(to, (void *)from, size)); }
API CUresult cuMemHostRegister(void *p, size_t n, unsigned flags) { return by_driver(cudaHostRegister(p, n, flags)); }
API CUresult cuMemHostUnregister(void *p) { return by_driver(cudaHostUnregister(p)); }
API CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr p) {
  return by_driver(cudaIpcGetMemHandle((cudaIpcMemHandle_t *)handle, (void *)p));
}
API CUresult cuIpcOpenMemHandle(CUdeviceptr *p, CUipcMemHandle handle, unsigned flags) {
  cudaIpcMemHandle_t same;
  memcpy(&same, &handle, sizeof same);
  return by_driver(cudaIpcOpenMemHandle((void **)p, same, flags));
}
API CUresult cuIpcCloseMemHandle(CUdeviceptr p) { return by_driver(cudaIpcCloseMemHandle((void *)p)); }

/* --- virtual memory, with which vLLM's sleep frees memory and keeps its addresses --- */

static void *reserve(void *at, size_t size, int access) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
  return mmap(at, size, access, flags, -1, 0);
}
API CUresult cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
  *size = 2 << 20;
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressReserve(CUdeviceptr *p, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *p = (CUdeviceptr)reserve(NULL, size, PROT_NONE);
  return CUDA_SUCCESS;
}
API CUresult cuMemAddressFree(CUdeviceptr p, size_t size) {
  munmap((void *)p, size);
  return CUDA_SUCCESS;
}
/* A handle is the size and the GPU of the memory. */
API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *p,
                         unsigned long long) {
  if (!take(p->location.id, size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = size << 8 | (unsigned)p->location.id;
  return CUDA_SUCCESS;
}
API CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  give_back(handle & 255, handle >> 8);
  return CUDA_SUCCESS;
}
API CUresult cuMemMap(CUdeviceptr p, size_t size, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  reserve((void *)p, size, PROT_READ | PROT_WRITE);
  return CUDA_SUCCESS;
}
API CUresult cuMemUnmap(CUdeviceptr p, size_t size) {
  reserve((void *)p, size, PROT_NONE);
  return CUDA_SUCCESS;
}
DRIVER_NOTHING(cuMemSetAccess, CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)
