// Two devices whose memory is the host's: streams, events, capture of graphs; counters.
//
// Operators run at once, on the thread that calls them (kernels.cpp). What is late is what a host may know: a stream is a
// queue of copies to the host, of events and of stretches of time; a device that is held works none of them off.
#include "device.h"

#include <ATen/core/GraphImplInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>

namespace fakegpu {
namespace {

[[noreturn]] void fail(const std::string& what) {  // torch.AcceleratorError
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 1, "fakegpu error: " + what);
}

// ---- counters of each thread, which outlive it

std::mutex counters_mutex;
std::map<int64_t, Counts*> counters;

// ---- streams and events

struct Recorded {  // one recording of an event
  bool done = false, captured = false;
  double at_s = 0;
};
struct Event {
  std::shared_ptr<Recorded> latest;
};
struct Item {
  std::function<void()> work;
  double seconds = 0;
  std::shared_ptr<Recorded> records, waits_for;
};
struct Queue {
  std::deque<Item> items;
  double now_s = 0;
};

constexpr int64_t kNotHeld = -1;
constexpr auto kPatience = std::chrono::seconds(10);
std::mutex mutex;  // of all below, up to the allocator
std::condition_variable moved;
std::map<std::pair<int, int64_t>, Queue> queues;  // by device and stream
int64_t held[kDevices] = {kNotHeld, kNotHeld};    // how many events a held device still lets through
bool lost[kDevices] = {};
double clock_s = -1;  // < 0: the host's
std::atomic<int64_t> streams_made{0};
const pid_t home = getpid();  // a forked child may use no device, and destroy no event: as with CUDA

thread_local int device_of_thread = 0;
thread_local int64_t stream_of_thread[kDevices] = {};

std::pair<int, int64_t> key(c10::Stream stream) { return {stream.device_index(), stream.id()}; }

double now_s() {
  return clock_s >= 0 ? clock_s : std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool step(int device, Queue& queue, std::vector<Item>& done) {
  if (queue.items.empty()) return false;
  Item& item = queue.items.front();
  if (held[device] == 0 || (item.waits_for && !item.waits_for->done)) return false;
  queue.now_s = std::max(queue.now_s, now_s()) + item.seconds;
  if (item.waits_for) queue.now_s = std::max(queue.now_s, item.waits_for->at_s);
  if (item.work) item.work();
  if (item.records) {
    item.records->done = true;
    item.records->at_s = queue.now_s;
    if (held[device] > 0) --held[device];
  }
  done.push_back(std::move(item));
  queue.items.pop_front();
  return true;
}

// Works off what may be. With the mutex held; what is done is dropped by the caller after it gave the mutex back, since the
// last owner of a tensor may need the interpreter.
std::vector<Item> work_off() {
  std::vector<Item> done;
  for (bool any = true; any;) {
    any = false;
    for (auto& [which, queue] : queues)
      while (step(which.first, queue, done)) any = true;
  }
  moved.notify_all();
  return done;
}

void push(c10::Stream stream, Item item) {
  std::vector<Item> done;
  std::lock_guard lock(mutex);
  queues[key(stream)].items.push_back(std::move(item));
  done = work_off();
}

template <typename Ready>
void wait_until(const Ready& ready) {
  count(kWaits);
  std::unique_lock lock(mutex);
  if (!moved.wait_for(lock, kPatience, ready))
    fail("a thread waits for a device that is held, and nobody let it go within 10 s");
}

// ---- capture: one at a time in the process

struct Capture {
  c10::Stream stream;
  at::GraphCaptureMode mode;
  int64_t thread;
  std::vector<std::function<void()>> kernels;
  std::vector<std::pair<c10::Storage, std::string>> saved;
  bool broken = false;
};
std::mutex capture_mutex;
std::optional<Capture> capture;
std::atomic<bool> capturing{false};
thread_local at::GraphCaptureMode mode_of_thread = at::GraphCaptureMode::Global;

struct Graph final : at::GraphImplInterface {
  explicit Graph(const at::GraphImplArgs&) {}

  void capture_begin(at::MempoolId_t, at::GraphCaptureMode mode) override {
    auto stream = current_stream(current_device().index());
    TORCH_CHECK(stream.id() != 0, "fakegpu: a capture needs another stream than the default one");
    if (mode == at::GraphCaptureMode::Default) mode = at::GraphCaptureMode::Global;
    std::lock_guard lock(capture_mutex);
    TORCH_CHECK(!capture, "fakegpu: another graph is captured now");
    capture.emplace(Capture{stream, mode, syscall(SYS_gettid), {}, {}});
    capturing = true;
  }
  void capture_end() override {
    std::optional<Capture> ended;
    {
      std::lock_guard lock(capture_mutex);
      TORCH_CHECK(capture, "fakegpu: no graph is captured");
      ended.swap(capture);
      capturing = false;
    }
    for (auto& [storage, bytes] : ended->saved) std::memcpy(storage.mutable_data(), bytes.data(), bytes.size());
    if (ended->broken) fail("operation failed due to a previous error during capture");
    kernels_ = std::move(ended->kernels);
  }
  void instantiate() override {}
  void replay() override {
    auto stream = current_stream(current_device().index());
    for (auto& kernel : kernels_) kernel();
    enqueue(stream, nullptr);
  }
  void reset() override { kernels_.clear(); }
  at::MempoolId_t pool() const override { return {1, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  std::vector<std::function<void()>> kernels_;
};

// ---- guard

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return current_device(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < kDevices, "fakegpu: there is no device ", int(device.index()));
    device_of_thread = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_of_thread = device.index(); }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : device_of_thread);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device.has_index() ? device : current_device(), ++streams_made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    stream_of_thread[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() * kDevices + stream.device_index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (getpid() != home) std::terminate();
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    count(kRecords);
    check_present(stream.device_index());
    if (!*event) *event = new Event;
    auto recorded = std::make_shared<Recorded>();
    recorded->captured = captures(stream);
    static_cast<Event*>(*event)->latest = recorded;
    if (!recorded->captured) push(stream, {nullptr, 0, recorded, nullptr});
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto& latest = static_cast<Event*>(event)->latest;
    if (!latest->captured) push(stream, {nullptr, 0, nullptr, latest});
  }
  bool queryEvent(void* event) const override {
    count(kQueries);
    return of_the_host(event, "a query of an event")->done;
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    auto first = of_the_host(begin, "elapsed_time"), last = of_the_host(end, "elapsed_time");
    return (last->at_s - first->at_s) * 1e3;
  }
  void synchronizeEvent(void* event) const override {
    count(kSynchronizations);
    auto recorded = of_the_host(event, "a wait for an event");
    wait_until([&] { return recorded->done; });
  }

  bool queryStream(const c10::Stream& stream) const override {
    count(kQueries);
    refuse_in_capture("a query of a stream");
    check_present(stream.device_index());
    std::lock_guard lock(mutex);
    return queues[key(stream)].items.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count(kSynchronizations);
    refuse_in_capture("a wait for a stream");
    check_present(stream.device_index());
    wait_until([&] { return queues[key(stream)].items.empty(); });
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    count(kSynchronizations);
    refuse_in_capture("a wait for a device");
    check_present(device);
    wait_until([&] {
      for (auto& [which, queue] : queues)
        if (which.first == device && !queue.items.empty()) return false;
      return true;
    });
  }
  bool isStreamCapturing(const c10::Stream& stream) const override { return captures(stream); }

 private:
  static std::shared_ptr<Recorded> of_the_host(void* event, const char* what) {
    refuse_in_capture(what);
    for (int device = 0; device < kDevices; ++device) check_present(device);
    auto recorded = static_cast<Event*>(event)->latest;
    if (recorded->captured) fail(std::string(what) + " that was recorded in a graph");
    std::lock_guard lock(mutex);  // what another thread wrote
    return recorded;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- hooks: random numbers are those of the CPU, so that a training has the CPU's losses

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  c10::DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? device_of_thread : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void*) const override { return current_device(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto grown = adopt(impl->device(), c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::GetAllocator(c10::kCPU)));
    if (storage.nbytes() && bytes) std::memcpy(grown.mutable_data(), storage.data(), std::min(bytes, storage.nbytes()));
    impl->set_data_ptr_noswap(grown.set_data_ptr(c10::DataPtr()));
    impl->set_nbytes(bytes);
  }
};

const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

}  // namespace

Counts& counts() {
  thread_local Counts* mine = [] {
    auto* made = new Counts{};
    std::lock_guard lock(counters_mutex);
    return counters[syscall(SYS_gettid)] = made;
  }();
  return *mine;
}

c10::Device current_device() { return {kType, static_cast<c10::DeviceIndex>(device_of_thread)}; }

c10::Stream current_stream(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, {kType, device}, stream_of_thread[device]);
}

void check_present(c10::DeviceIndex device) {
  if (getpid() != home) fail("this process was forked");
  std::lock_guard lock(mutex);
  if (lost[device]) fail("device " + std::to_string(device) + " was lost");
}

bool captures(c10::Stream stream) {
  if (!capturing) return false;
  std::lock_guard lock(capture_mutex);
  return capture && capture->stream == stream;
}

void refuse_in_capture(const char* what) {
  if (!capturing) return;
  std::lock_guard lock(capture_mutex);
  if (!capture) return;
  bool own = capture->thread == syscall(SYS_gettid) && capture->mode != at::GraphCaptureMode::Relaxed;
  bool others = capture->thread != syscall(SYS_gettid) && capture->mode == at::GraphCaptureMode::Global &&
      mode_of_thread == at::GraphCaptureMode::Global;
  if (!own && !others) return;
  capture->broken = true;
  fail(std::string("operation not permitted when stream is capturing: ") + what);
}

void record_kernel(c10::Stream stream, std::function<void()> kernel) {
  std::lock_guard lock(capture_mutex);
  if (capture && capture->stream == stream) capture->kernels.push_back(std::move(kernel));
}

void save_in_capture(const c10::Storage& storage) {
  std::lock_guard lock(capture_mutex);
  if (!capture) return;
  for (auto& [known, bytes] : capture->saved)
    if (known.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return;
  capture->saved.emplace_back(storage, std::string(static_cast<const char*>(storage.data()), storage.nbytes()));
}

void enqueue(c10::Stream stream, std::function<void()> work, double seconds) { push(stream, {std::move(work), seconds}); }

bool is_late(c10::Stream stream) {
  std::lock_guard lock(mutex);
  return held[stream.device_index()] != kNotHeld || !queues[key(stream)].items.empty();
}

void wait_for(c10::Stream stream) {
  if (is_late(stream)) enqueue(stream, nullptr);
  wait_until([&] { return queues[key(stream)].items.empty(); });
}

}  // namespace fakegpu

namespace at {
using FakeGraph = fakegpu::Graph;
REGISTER_GRAPH_IMPL(FAKEGPU, FakeGraph)
}  // namespace at

// ---- what control.py calls

using namespace fakegpu;

extern "C" {

void fakegpu_hold(int device, int64_t events) {  // -1: lets go
  std::vector<Item> done;
  std::lock_guard lock(mutex);
  held[device] = events;
  done = work_off();
}

void fakegpu_lose(int device) {
  std::lock_guard lock(mutex);
  lost[device] = true;
}

void fakegpu_clock(double seconds) {  // < 0: the host's
  std::lock_guard lock(mutex);
  clock_s = seconds;
}

void fakegpu_work(int device, int64_t stream, double seconds) {
  enqueue(c10::Stream(c10::Stream::UNSAFE, {kType, static_cast<c10::DeviceIndex>(device)}, stream), nullptr, seconds);
}

void fakegpu_thread_capture_mode(int mode) { mode_of_thread = static_cast<at::GraphCaptureMode>(mode); }

// Thread and its counts, in one row of 1 + kCounts numbers each; returns the number of threads.
int fakegpu_counts(int64_t* rows, int most) {
  std::lock_guard lock(counters_mutex);
  int number = 0;
  for (auto& [thread, counts] : counters) {
    if (number == most) break;
    int64_t* row = rows + number++ * (1 + kCounts);
    row[0] = thread;
    for (int kind = 0; kind < kCounts; ++kind) row[1 + kind] = (*counts)[kind];
  }
  return number;
}

void fakegpu_forget_counts() {
  std::lock_guard lock(counters_mutex);
  for (auto& [thread, counts] : counters)
    for (auto& count : *counts) count = 0;
}

}  // extern "C"
