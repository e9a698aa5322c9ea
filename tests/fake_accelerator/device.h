// What the parts of the fake accelerator share: queues and counters (device.cpp), memory (memory.cpp), operators (kernels.cpp).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <functional>

namespace fakegpu {

constexpr int kDevices = 2;
constexpr auto kType = c10::DeviceType::PrivateUse1;

// What a thread asked of the devices; control.py has the same order.
enum Count {
  kScalarReads, kCopiesToHost, kCopiesToDevice, kCopiesOnDevice, kWaits, kSynchronizations, kQueries, kRecords, kKernels, kPinned,
  kCounts
};
using Counts = std::array<std::atomic<int64_t>, kCounts>;
Counts& counts();  // of the calling thread
inline void count(Count what) { ++counts()[what]; }

c10::Device current_device();
c10::Stream current_stream(c10::DeviceIndex device);
bool captures(c10::Stream stream);
// Ends a capture, as CUDA does, with an error where a call that is not allowed while one runs is made.
void refuse_in_capture(const char* what);
void check_present(c10::DeviceIndex device);  // throws where the device was lost

// Puts work behind all that the stream has; it runs at once unless the device is held.
void enqueue(c10::Stream stream, std::function<void()> work, double seconds = 0);
bool is_late(c10::Stream stream);  // what is enqueued now has to wait
void wait_for(c10::Stream stream);  // as a call does that ends with the work it puts there

c10::Allocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
// Host memory that counts as memory of the device from here on.
c10::Storage adopt(c10::Device device, c10::Storage host);

// A kernel of a graph that is captured, and a storage that it writes to: the capture puts the contents back in the end.
void record_kernel(c10::Stream stream, std::function<void()> kernel);
void save_in_capture(const c10::Storage& storage);

}  // namespace fakegpu
