// Operators of the fake accelerator: those of the CPU, on the same memory.
//
// A call's tensors are seen as tensors of the CPU for as long as it lasts. What it returns becomes memory of the device.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>
#include <unordered_set>

namespace fakegpu {
namespace {

using at::Tensor;

// The tensors of one call.
class Call {
 public:
  std::optional<c10::Device> device;

  Tensor on_host(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kType) return tensor;
    if (!device) device = tensor.device();
    TORCH_CHECK(*device == tensor.device(), "Expected all tensors to be on the same device, but found ", *device, " and ",
                tensor.device());
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        host_storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = host.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    impl->_set_conj(tensor.is_conj());
    impl->_set_neg(tensor.is_neg());
    tensors_.push_back({tensor, host});
    return host;
  }

  // What a kernel made, or the tensor that it was given.
  Tensor on_device(const Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [tensor, host] : tensors_)
      if (host.is_same(result)) return tensor;
    if (!device) return result;
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        device_storage(result.storage()), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
    auto* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    impl->_set_conj(result.is_conj());
    impl->_set_neg(result.is_neg());
    return tensor;
  }

  // A kernel may have resized what it was given to write to.
  void take_over_sizes() {
    for (auto& [tensor, host] : tensors_) {
      auto* storage = tensor.storage().unsafeGetStorageImpl();
      if (host.storage().data() != storage->data()) {
        auto grown = adopt(tensor.device(), host.storage());
        storage->set_nbytes(grown.nbytes());
        storage->set_data_ptr_noswap(grown.set_data_ptr(c10::DataPtr()));
      }
      if (host.sizes() != tensor.sizes() || host.strides() != tensor.strides())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

 private:
  c10::Storage host_storage(const c10::Storage& storage) {
    for (auto& [real, host] : storages_)
      if (real.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return host;
    c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)),
                      c10::GetAllocator(c10::kCPU), true);
    storages_.emplace_back(storage, host);
    return host;
  }

  c10::Storage device_storage(const c10::Storage& storage) {
    for (auto& [real, host] : storages_)
      if (host.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return real;
    storages_.emplace_back(adopt(*device, storage), storage);
    return storages_.back().first;
  }

  c10::SmallVector<std::pair<Tensor, Tensor>, 6> tensors_;         // on the device, on the host
  c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 6> storages_;
};

template <typename Change>
void change_tensors(c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<Tensor> changed;
    for (const Tensor& tensor : value.toTensorList()) changed.push_back(change(tensor));
    value = c10::List<Tensor>(std::move(changed));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
      changed.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    value = std::move(changed);
  }
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call;
  auto& schema = op.schema();
  auto arguments = torch::jit::last(stack, schema.arguments().size());
  for (size_t at = 0; at < arguments.size(); ++at) {
    auto& argument = (*stack)[stack->size() - arguments.size() + at];
    change_tensors(argument, [&](const Tensor& tensor) { return call.on_host(tensor); });
    if (argument.isDevice() && argument.toDevice().type() == kType) {
      if (!call.device) call.device = argument.toDevice();
      argument = c10::Device(c10::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (schema.is_mutable()) call.take_over_sizes();
  for (size_t at = stack->size() - schema.returns().size(); at < stack->size(); ++at)
    change_tensors((*stack)[at], [&](const Tensor& tensor) { return call.on_device(tensor); });
}

// The current stream of the first tensor's device.
std::optional<c10::Stream> stream_of(at::ArrayRef<c10::IValue> values) {
  std::optional<c10::Stream> stream;
  for (auto value : values)
    change_tensors(value, [&](const Tensor& tensor) {
      if (!stream && tensor.defined() && tensor.device().type() == kType) stream = current_stream(tensor.device().index());
      return tensor;
    });
  return stream;
}

// While a graph is captured: what a kernel writes to is put back in the end, and each replay runs it again into the same
// tensors.
void run_in_capture(c10::Stream stream, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto arguments = torch::jit::last(stack, schema.arguments().size()).vec();
  for (size_t at = 0; at < arguments.size(); ++at) {
    auto* alias = schema.arguments()[at].alias_info();
    if (!alias || !alias->isWrite()) continue;
    change_tensors(arguments[at], [&](const Tensor& tensor) {
      if (tensor.defined()) save_in_capture(tensor.storage());
      return tensor;
    });
  }
  run_on_host(op, stack);
  auto results = torch::jit::last(stack, schema.returns().size()).vec();
  record_kernel(stream, [op, arguments, results] {
    torch::jit::Stack again = arguments;
    run_on_host(op, &again);
    for (size_t at = 0; at < results.size(); ++at) {
      std::vector<Tensor> from, to;
      auto into = [](std::vector<Tensor>& all) {
        return [&all](const Tensor& tensor) { all.push_back(tensor); return tensor; };
      };
      c10::IValue made = again[at], kept = results[at];
      change_tensors(made, into(from));
      change_tensors(kept, into(to));
      for (size_t one = 0; one < from.size(); ++one) {
        if (!from[one].defined() || from[one].storage().data() == to[one].storage().data()) continue;
        Call call;
        call.on_host(to[one]).copy_(call.on_host(from[one]));
      }
    }
  });
}

// On CUDA the host waits in these for the number of elements of their results.
bool waits(const c10::OperatorHandle& op) {
  static const auto* names = new std::unordered_set<std::string>{
      "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::repeat_interleave", "aten::bincount"};
  static thread_local std::unordered_map<const void*, bool> known;
  auto [found, is_new] = known.try_emplace(&op.schema(), false);
  if (is_new) found->second = names->count(op.schema().name());
  return found->second;
}

void launch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  count(kKernels);
  auto stream = stream_of(torch::jit::last(stack, op.schema().arguments().size()));
  if (!stream) return run_on_host(op, stack);
  check_present(stream->device_index());
  if (captures(*stream)) return run_in_capture(*stream, op, stack);
  run_on_host(op, stack);
  if (waits(op)) {
    refuse_in_capture(op.schema().name().c_str());
    wait_for(*stream);
  } else if (is_late(*stream)) {
    enqueue(*stream, nullptr);
  }
}

// ---- operators of their own

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device && device->has_index() ? device : std::nullopt);
  return at::detail::empty_strided_generic(size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void copy_now(const Tensor& from, const Tensor& to) {
  Call source, target;  // of two devices, perhaps
  target.on_host(to).copy_(source.on_host(from));
}

// A copy from a device that is late arrives in pinned memory when the stream comes to it; until then no number lies there.
void copy_later(c10::Stream stream, const Tensor& from, const Tensor& to) {
  Call call;
  Tensor value = call.on_host(from).to(to.scalar_type()).expand(to.sizes()).contiguous().clone();
  auto bytes = value.nbytes();
  auto* target = to.mutable_data_ptr();
  std::memset(target, 0xff, bytes);
  enqueue(stream, [value = value.storage(), memory = to.storage(), target, bytes] { std::memcpy(target, value.data(), bytes); });
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool to_host = to.is_cpu(), from_host = from.is_cpu();
  count(to_host ? kCopiesToHost : from_host ? kCopiesToDevice : kCopiesOnDevice);
  auto device = to_host ? from.device() : to.device();
  auto stream = current_stream(device.index());
  check_present(device.index());
  bool pinned = (to_host && to.is_pinned() && to.is_contiguous()) || (from_host && from.is_pinned());
  bool waits = to_host ? !(non_blocking && pinned) : from_host && !non_blocking;
  if (waits) {
    refuse_in_capture("a copy that waits");
    wait_for(stream);
  }
  if (captures(stream)) {
    save_in_capture(to.storage());
    record_kernel(stream, [from, to] { copy_now(from, to); });
  }
  if (to_host && !waits && !captures(stream) && is_late(stream)) {
    copy_later(stream, from, to);
  } else {
    copy_now(from, to);
    if (is_late(stream)) enqueue(stream, nullptr);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  count(kScalarReads);
  refuse_in_capture("a read of a number");
  check_present(tensor.device().index());
  wait_for(current_stream(tensor.device().index()));
  Call call;
  return at::_local_scalar_dense(call.on_host(tensor));
}

Tensor& set_storage(Tensor& tensor, c10::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.size() == size.size())
    impl->set_sizes_and_strides(size, stride, offset);
  else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return tensor;
}

Tensor& set_storage_whole(Tensor& tensor, c10::Storage source) {
  int64_t numbers = source.nbytes() / tensor.element_size();
  return set_storage(tensor, std::move(source), 0, {numbers}, {});
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_storage(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& tensor) {
  c10::DeviceGuard guard(tensor.device());
  return set_storage(tensor, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true), 0, {0}, {});
}

void record_stream(Tensor&, c10::Stream) {}

int64_t no_fused_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                           std::optional<double>, bool) {
  return 0;  // the kernel that is made of other operators
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
  count(kKernels);
  Call call;
  auto bias_on_host = bias && bias->defined() ? std::optional<Tensor>(call.on_host(*bias)) : std::nullopt;
  return call.on_device(at::convolution(call.on_host(input), call.on_host(weight), bias_on_host, stride, padding, dilation,
                                        transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  count(kKernels);
  Call call;
  int64_t biases = transposed ? weight.size(1) * groups : weight.size(0);
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      call.on_host(grad), call.on_host(input), call.on_host(weight), {biases}, stride, padding, dilation, transposed,
      output_padding, groups, mask);
  return {call.on_device(of_input), call.on_device(of_weight), call.on_device(of_bias)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_storage_whole);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &no_fused_attention);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  // The CPU has a kernel of its own; without these lines torch would take the one that it makes of other operators.
  for (auto* name : {"native_layer_norm", "native_group_norm", "_native_batch_norm_legit"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&launch>());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(nll_loss, fp32)
  KERNEL_PRIVATEUSEONE(cross_entropy_loss, fp32)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
}

// A copy resolves both bits; otherwise torch would resolve them by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// Autograd counts the devices once, at the first backward pass, which the parent of a fork may have had without them.
struct Autograd : torch::autograd::Engine {
  static void count_devices() {
    auto& engine = get_default_engine();
    engine.initialize_device_threads_pool();
    if ((engine.*&Autograd::device_ready_queues_).empty()) (engine.*&Autograd::start_device_threads)();
  }
};

}  // namespace
}  // namespace fakegpu

extern "C" void fakegpu_start_autograd() { fakegpu::Autograd::count_devices(); }
