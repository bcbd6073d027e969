/* The part of NVIDIA's management library by which vLLM, torch and ownloop count GPUs. See runtime.c. */
#include <stdio.h>
#include <stdlib.h>

typedef unsigned long Device; /* a GPU's number and 1 */
typedef unsigned long long Bytes;

static unsigned count(void) {
  const char *n = getenv("PRETENDED_GPUS");
  return n ? atoi(n) : 1;
}
static Bytes total(void) {
  const char *gb = getenv("PRETENDED_GPU_GB");
  return (Bytes)((gb ? atof(gb) : 80.0) * (1ull << 30));
}

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int error) { return "an error of a pretended driver"; }
int nvmlDeviceGetCount_v2(unsigned *n) { return *n = count(), 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, Device *device) { return *device = i + 1, i < count() ? 0 : 2; }
int nvmlDeviceGetHandleByUUID(const char *uuid, Device *device) {
  return *device = strtoul(uuid + 4, NULL, 16) + 1, 0; /* GPU-0000000N-... */
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device *device) { return *device = 1, 0; }
int nvmlDeviceGetComputeRunningProcesses(Device device, unsigned *n, void *found) { return *n = 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(Device device, unsigned link, int *kind) { return 3; }  /* not supported */
int nvmlDeviceGetNvLinkRemotePciInfo_v2(Device device, unsigned link, void *found) { return 3; }
int nvmlDeviceGetIndex(Device device, unsigned *i) { return *i = device - 1, 0; }
int nvmlDeviceGetName(Device device, char *name, unsigned size) {
  return snprintf(name, size, "pretended NVIDIA H100 80GB HBM3"), 0;
}
int nvmlDeviceGetUUID(Device device, char *uuid, unsigned size) {
  return snprintf(uuid, size, "GPU-%08lx-0000-0000-0000-000000000000", device - 1), 0;
}
int nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) { return *major = 9, *minor = 0; }
int nvmlDeviceGetMemoryInfo(Device device, Bytes *info) { return info[0] = info[1] = total(), info[2] = 0; }
int nvmlDeviceGetMemoryInfo_v2(Device device, Bytes *info) {
  return info[1] = info[3] = total(), info[2] = info[4] = 0; /* info[0] holds the version of the struct */
}
int nvmlDeviceGetP2PStatus(Device reader, Device owner, int kind, int *status) { return *status = 0; }
int nvmlDeviceGetNvLinkState(Device device, unsigned link, unsigned *active) { return *active = 1, 0; }
int nvmlDeviceGetTotalEnergyConsumption(Device device, Bytes *energy) { return *energy = 0; }
int nvmlSystemGetDriverVersion(char *version, unsigned size) { return snprintf(version, size, "580.00"), 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }
