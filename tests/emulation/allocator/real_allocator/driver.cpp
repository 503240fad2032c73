// Run torch's caching allocator on the events of standard input, without a GPU.
//
// Each line is one event; the program answers each with one line:
//   a ID BYTES STREAM   allocate        -> address, reserved, allocated and active bytes
//   f ID                free            -> reserved, allocated and active bytes
//   r ID STREAM         record a use on another stream
//   b 0|1               whether other streams are busy: their uses do not complete
//   e                   empty the cache
//   s                   snapshot        -> one line of JSON, in the form of torch.cuda.memory._snapshot
// A failed allocation is answered with "full".
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/cuda/PeerToPeerAccess.h>

#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>

using namespace c10::cuda;
namespace allocator = c10::cuda::CUDACachingAllocator;

extern "C" void fake_cuda_set_busy(int busy);
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*function)(c10::DeviceIndex));
}

static CUDAStream stream_of(long number) {
  auto handle = reinterpret_cast<cudaStream_t>(number ? 0x1000 + 16 * number : 0);
  return getStreamFromExternal(handle, 0);
}

static void report() {
  auto stats = allocator::getDeviceStats(0);
  std::cout << stats.reserved_bytes[0].current << " " << stats.allocated_bytes[0].current << " "
            << stats.active_bytes[0].current << " " << stats.inactive_split_bytes[0].current
            << std::endl;
}

static const char* action_name(allocator::TraceEntry::Action action) {
  switch (action) {
    case allocator::TraceEntry::ALLOC: return "alloc";
    case allocator::TraceEntry::FREE_REQUESTED: return "free_requested";
    case allocator::TraceEntry::FREE_COMPLETED: return "free_completed";
    case allocator::TraceEntry::SEGMENT_ALLOC: return "segment_alloc";
    case allocator::TraceEntry::SEGMENT_FREE: return "segment_free";
    case allocator::TraceEntry::SEGMENT_MAP: return "segment_map";
    case allocator::TraceEntry::SEGMENT_UNMAP: return "segment_unmap";
    case allocator::TraceEntry::SNAPSHOT: return "snapshot";
    case allocator::TraceEntry::OOM: return "oom";
  }
  return "unknown";
}

static void write_segments(std::ostream& out, const allocator::SnapshotInfo& snapshot) {
  const char* comma = "";
  for (auto& segment : snapshot.segments) {
    out << comma << "{\"device\":0,\"address\":" << segment.address
        << ",\"total_size\":" << segment.total_size
        << ",\"allocated_size\":" << segment.allocated_size
        << ",\"active_size\":" << segment.active_size
        << ",\"requested_size\":" << segment.requested_size
        << ",\"stream\":" << reinterpret_cast<size_t>(segment.stream) << ",\"segment_type\":\""
        << (segment.is_large ? "large" : "small") << "\",\"segment_pool_id\":[0,0]"
        << ",\"is_expandable\":" << (segment.is_expandable ? "true" : "false")
        << ",\"frames\":[],\"blocks\":[";
    size_t address = segment.address;
    const char* inner = "";
    for (auto& block : segment.blocks) {
      out << inner << "{\"address\":" << address << ",\"size\":" << block.size
          << ",\"requested_size\":" << block.requested_size << ",\"state\":\""
          << (block.allocated ? "active_allocated"
                              : (block.active ? "active_pending_free" : "inactive"))
          << "\",\"frames\":[]}";
      address += block.size;
      inner = ",";
    }
    out << "]}";
    comma = ",";
  }
}

static void write_snapshot(std::ostream& out) {
  auto snapshot = allocator::snapshot();
  out << "{\"segments\":[";
  write_segments(out, snapshot);
  out << "],\"device_traces\":[[";
  const char* comma = "";
  for (auto& entry : snapshot.device_traces.at(0)) {
    bool failed = entry.action_ == allocator::TraceEntry::OOM;
    out << comma << "{\"action\":\"" << action_name(entry.action_) << "\",\""
        << (failed ? "device_free" : "addr") << "\":" << entry.addr_ << ",\"size\":" << entry.size_
        << ",\"stream\":" << reinterpret_cast<size_t>(entry.stream_)
        << ",\"pool_id\":[0,0],\"frames\":[]}";
    comma = ",";
  }
  out << "]],\"allocator_settings\":{\"PYTORCH_CUDA_ALLOC_CONF\":\""
      << c10::CachingAllocator::getAllocatorSettings() << "\"},\"external_annotations\":[]}"
      << std::endl;
}

int main() {
  std::ios::sync_with_stdio(false);
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  c10::cuda::detail::init_p2p_access_cache(1);
  allocator::init(1);
  allocator::CUDAAllocatorConfig::set_expandable_segments_handle_type(
      allocator::Expandable_Segments_Handle_Type::POSIX_FD);
  allocator::recordHistory(
      true, nullptr, 1 << 22, allocator::RecordContext::NEVER, /*clearHistory=*/false, {});
  std::map<long, c10::DataPtr> live;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    char kind = 0;
    long id = 0, bytes = 0, stream = 0;
    words >> kind >> id >> bytes >> stream;
    if (kind == 'a') {
      setCurrentCUDAStream(stream_of(stream));
      try {
        live[id] = allocator::get()->allocate(bytes);
      } catch (const c10::OutOfMemoryError& error) {
        if (std::getenv("FAKE_CUDA_VERBOSE")) std::cerr << error.what() << std::endl;
        std::cout << "full" << std::endl;
        continue;
      }
      std::cout << reinterpret_cast<size_t>(live[id].get()) << " ";
      report();
    } else if (kind == 'f') {
      live.erase(id);
      report();
    } else if (kind == 'r') {
      allocator::recordStream(live.at(id), stream_of(bytes));
      report();
    } else if (kind == 'b') {
      fake_cuda_set_busy(static_cast<int>(id));
      report();
    } else if (kind == 'e') {
      allocator::emptyCache();
      report();
    } else if (kind == 's') {
      write_snapshot(std::cout);
    }
  }
  std::cout.flush();
  _exit(0);  // the destructors would call a device that does not exist
}
