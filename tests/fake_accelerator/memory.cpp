// Memory of the fake devices, which is the host's: counted, with an end, and kept as torch.cuda's allocator keeps it; and
// pinned memory.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <mutex>

namespace fakegpu {
namespace {

constexpr size_t kSmall = 1 << 20, kRound = 512, kSegment = 2 << 20;
size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

struct Block {
  c10::Device device;
  size_t asked, bytes;
  c10::Storage host;
};

struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto device = current_device();
    return take(device, c10::Storage(c10::Storage::use_byte_size_t(), bytes, c10::GetAllocator(c10::kCPU)));
  }

  c10::DataPtr take(c10::Device device, c10::Storage host) {
    size_t asked = host.nbytes();
    if (!asked) return {nullptr, device};
    check_present(device.index());
    auto block = std::make_unique<Block>(Block{device, asked, rounded(asked, kRound), std::move(host)});
    reserve(*block);
    note(*block, true);
    void* data = block->host.mutable_data();
    return {data, block.release(), &Memory::give_back, device};
  }

  static void give_back(void* context) {
    std::unique_ptr<Block> block(static_cast<Block*>(context));
    instance().note(*block, false);
  }

  static Memory& instance() {
    static auto* memory = new Memory;  // lives as long as any tensor
    return *memory;
  }

  void set_limits(int device, int64_t total, int64_t elsewhere) {
    std::lock_guard lock(mutex_);
    total_[device] = total;
    elsewhere_[device] = elsewhere;
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard lock(mutex_);
    for (auto& stats : stats_) flush(stats);
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return stats_[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    for_each(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard lock(mutex_);
    return {total_[device] - elsewhere_[device] - stats_[device].reserved_bytes[0].current, total_[device]};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  using Stats = c10::CachingDeviceAllocator::DeviceStats;

  // A device's memory is taken in segments, and kept; where it does not suffice, what is unused goes back first.
  void reserve(const Block& block) {
    std::lock_guard lock(mutex_);
    auto at = block.device.index();
    auto& stats = stats_[at];
    int64_t needed = stats.allocated_bytes[0].current + block.bytes, limit = total_[at] - elsewhere_[at];
    if (needed <= stats.reserved_bytes[0].current) return;
    int64_t segment = rounded(block.bytes, kSegment);
    if (stats.reserved_bytes[0].current + segment > limit) {
      ++stats.num_alloc_retries;
      flush(stats);
    }
    if (stats.reserved_bytes[0].current + segment > limit) {
      ++stats.num_ooms;
      char text[256];
      std::snprintf(text, sizeof text,
        "fakegpu out of memory. Tried to allocate %.2f MiB. GPU %d has a total capacity of %.2f GiB of which %.2f MiB is free.",
        block.asked / 1048576., int(at), total_[at] / 1073741824., (limit - stats.reserved_bytes[0].current) / 1048576.);
      TORCH_CHECK_WITH(OutOfMemoryError, false, text);
    }
    for (auto pool : {0, int(pool_of(block))}) {
      stats.segment[pool].increase(1);
      stats.reserved_bytes[pool].increase(segment);
    }
    ++stats.num_device_alloc;
  }

  void flush(Stats& stats) {
    for (auto& reserved : stats.reserved_bytes) {
      int64_t in_use = rounded(stats.allocated_bytes[&reserved - &stats.reserved_bytes[0]].current, kSegment);
      if (reserved.current > in_use) reserved.decrease(reserved.current - in_use);
    }
    ++stats.num_device_free;
  }

  static size_t pool_of(const Block& block) { return block.bytes <= kSmall ? 1 : 2; }

  void note(const Block& block, bool taken) {
    std::lock_guard lock(mutex_);
    auto& stats = stats_[block.device.index()];
    for (auto pool : {size_t(0), pool_of(block)}) {
      auto change = [&](auto& stat, size_t by) { taken ? stat[pool].increase(by) : stat[pool].decrease(by); };
      change(stats.allocation, 1);
      change(stats.active, 1);
      change(stats.allocated_bytes, block.bytes);
      change(stats.active_bytes, block.bytes);
      change(stats.requested_bytes, block.asked);
    }
  }

  template <typename Change>
  void for_each(c10::DeviceIndex device, const Change& change) {
    std::lock_guard lock(mutex_);
    auto& stats = stats_[device];
    for (auto* kind : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                       &stats.active_bytes, &stats.requested_bytes})
      for (auto& stat : *kind) change(stat);
  }

  std::mutex mutex_;
  Stats stats_[kDevices];
  int64_t total_[kDevices] = {8LL << 30, 8LL << 30}, elsewhere_[kDevices] = {};
};

struct Pinned final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    count(kPinned);
    auto* block = new c10::DataPtr(c10::GetAllocator(c10::kCPU)->allocate(bytes));
    std::lock_guard lock(mutex_);
    blocks_[block->get()] = bytes;
    return {block->get(), block, &Pinned::give_back, c10::kCPU};
  }
  static void give_back(void* context) {
    std::unique_ptr<c10::DataPtr> block(static_cast<c10::DataPtr*>(context));
    std::lock_guard lock(instance().mutex_);
    instance().blocks_.erase(block->get());
  }
  static Pinned& instance() {
    static auto* pinned = new Pinned;
    return *pinned;
  }
  bool has(const void* data) {
    std::lock_guard lock(mutex_);
    auto after = blocks_.upper_bound(const_cast<void*>(data));
    if (after == blocks_.begin()) return false;
    auto& [begin, bytes] = *--after;
    return data < static_cast<const char*>(begin) + bytes;
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  std::mutex mutex_;
  std::map<void*, size_t> blocks_;
};

const bool registered = [] {
  c10::SetAllocator(kType, &Memory::instance());
  at::setHostAllocator(kType, &Pinned::instance());
  return true;
}();

}  // namespace

c10::Allocator* allocator() { return &Memory::instance(); }

c10::Storage adopt(c10::Device device, c10::Storage host) {
  size_t bytes = host.nbytes();
  auto data = Memory::instance().take(device, std::move(host));
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), allocator(), true);
}

c10::Allocator* pinned_allocator() { return &Pinned::instance(); }

bool is_pinned(const void* data) { return Pinned::instance().has(data); }

}  // namespace fakegpu

extern "C" void fakegpu_memory(int device, int64_t total, int64_t elsewhere) {
  fakegpu::Memory::instance().set_limits(device, total, elsewhere);
}
