// A CUDA runtime and driver without a device: memory is only counted, and addresses are invented.
//
// FAKE_CUDA_BYTES is the memory of the device. Addresses grow from 2^45 in steps of 2 MiB, as in the
// model. Kernels never run: events are complete unless the driver program says that streams are busy.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {
constexpr size_t kStep = 2097152;
size_t next_address = size_t{1} << 45;
size_t used = 0;
int busy = 0;
std::map<size_t, size_t> sizes;

size_t total() {
  const char* text = std::getenv("FAKE_CUDA_BYTES");
  return text ? std::strtoull(text, nullptr, 10) : size_t{1} << 44;
}

size_t take(size_t size) {
  size_t address = next_address;
  next_address += (size + kStep - 1) / kStep * kStep;
  return address;
}
}  // namespace

extern "C" {
void fake_cuda_set_busy(int value) { busy = value; }

cudaError_t cudaMalloc(void** pointer, size_t size) {
  if (used + size > total()) return cudaErrorMemoryAllocation;
  used += size;
  size_t address = take(size);
  sizes[address] = size;
  *pointer = reinterpret_cast<void*>(address);
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  auto found = sizes.find(reinterpret_cast<size_t>(pointer));
  if (found != sizes.end()) {
    used -= found->second;
    sizes.erase(found);
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* all) {
  *all = total();
  *free = total() - used;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof(*properties));
  properties->totalGlobalMem = total();
  properties->major = 9;
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t) { return busy ? cudaErrorNotReady : cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "no device"; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }

// The driver: pages of expandable segments.
static CUresult reserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  *address = take(size);
  return CUDA_SUCCESS;
}
static CUresult create(CUmemGenericAllocationHandle* handle, size_t size,
                       const CUmemAllocationProp*, unsigned long long) {
  if (used + size > total()) return CUDA_ERROR_OUT_OF_MEMORY;
  used += size;
  *handle = size;
  return CUDA_SUCCESS;
}
static CUresult release(CUmemGenericAllocationHandle handle) {
  used -= handle;
  return CUDA_SUCCESS;
}
static CUresult describe(CUresult, const char** text) { *text = "no device"; return CUDA_SUCCESS; }
static CUresult nothing() { return CUDA_SUCCESS; }

static void* driver_function(const std::string& name) {
  if (name == "cuMemAddressReserve") return reinterpret_cast<void*>(&reserve);
  if (name == "cuMemCreate") return reinterpret_cast<void*>(&create);
  if (name == "cuMemRelease") return reinterpret_cast<void*>(&release);
  if (name == "cuGetErrorString") return reinterpret_cast<void*>(&describe);
  return reinterpret_cast<void*>(&nothing);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = driver_function(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
}
