// A kernel as XLA calls it, by its C interface: the C++ one (ffi.h of XLA) alone takes more than a second to compile.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "xla/ffi/api/c_api.h"

static inline int64_t elements(const XLA_FFI_Buffer& buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer.rank; ++i) count *= buffer.dims[i];
  return count;
}

static inline int64_t bytes(const XLA_FFI_Buffer& buffer) {
  switch (buffer.dtype) {
    case XLA_FFI_DataType_F64: case XLA_FFI_DataType_S64: case XLA_FFI_DataType_U64: return elements(buffer) * 8;
    case XLA_FFI_DataType_F32: case XLA_FFI_DataType_S32: case XLA_FFI_DataType_U32: return elements(buffer) * 4;
    case XLA_FFI_DataType_F16: case XLA_FFI_DataType_BF16:
    case XLA_FFI_DataType_S16: case XLA_FFI_DataType_U16: return elements(buffer) * 2;
    default: return elements(buffer);
  }
}

static inline XLA_FFI_DataType dtype_of(int64_t) { return XLA_FFI_DataType_S64; }
static inline XLA_FFI_DataType dtype_of(float) { return XLA_FFI_DataType_F32; }

// Those of <stdexcept> take 0.1 s more to compile.
class BadAttribute : public std::exception {
 public:
  explicit BadAttribute(const char* name) {
    std::snprintf(message_, sizeof message_, "the attribute %s is missing or of another type", name);
  }
  const char* what() const noexcept override { return message_; }

 private:
  char message_[100];
};

// Buffers and attributes of a call, of the types that `native` in Python gives them.
class Call {
 public:
  explicit Call(const XLA_FFI_CallFrame* frame) : frame(frame) {}

  const XLA_FFI_CallFrame* const frame;

  int64_t arguments() const { return frame->args.size; }
  const XLA_FFI_Buffer& argument(int64_t i) const { return *static_cast<const XLA_FFI_Buffer*>(frame->args.args[i]); }
  const XLA_FFI_Buffer& result() const { return *static_cast<const XLA_FFI_Buffer*>(frame->rets.rets[0]); }
  const int64_t* sizes(int64_t i) const { return argument(i).dims; }

  template <typename T>
  const T* data(int64_t i) const { return static_cast<const T*>(argument(i).data); }
  template <typename T>
  T* out() const { return static_cast<T*>(result().data); }

  // Throws if there is none of that name and type.
  template <typename T>
  T attribute(const char* name) const {
    for (int64_t i = 0; i < frame->attrs.size; ++i) {
      const XLA_FFI_ByteSpan& own = *frame->attrs.names[i];
      if (own.len != std::strlen(name) || std::memcmp(own.ptr, name, own.len) != 0) continue;
      const auto* const scalar = static_cast<const XLA_FFI_Scalar*>(frame->attrs.attrs[i]);
      if (frame->attrs.types[i] != XLA_FFI_AttrType_SCALAR || scalar->dtype != dtype_of(T{})) break;
      return *static_cast<const T*>(scalar->value);
    }
    throw BadAttribute(name);
  }

  // 1 where an int32[] comes first, which says with which one of a group of operands, or of layers, to compute; else 0.
  int64_t first() const { return argument(0).rank == 0; }
  int64_t group() const { return first() ? *data<int32_t>(0) : 0; }

  // Of tokens [T, D], the argument `i`, those before zeros at the end, whose results of `columns` numbers are zeros too.
  int64_t without_zeros(int64_t i, int64_t columns) const {
    const int64_t *size = sizes(i), given = size[0];
    int64_t end = given * size[1];
    while (end > 0 && data<float>(i)[end - 1] == 0) --end;
    const int64_t tokens = (end + size[1] - 1) / size[1];
    std::memset(out<float>() + tokens * columns, 0, sizeof(float) * (given - tokens) * columns);
    return tokens;
  }
};

// What each source file defines.
static void run(const Call& call);

static inline XLA_FFI_Error* failure(const XLA_FFI_CallFrame* frame, XLA_FFI_Error_Code code, const char* message) {
  XLA_FFI_Error_Create_Args args{XLA_FFI_Error_Create_Args_STRUCT_SIZE, nullptr, message, code};
  return frame->api->XLA_FFI_Error_Create(&args);
}

extern "C" XLA_FFI_Error* llama_jax_run(XLA_FFI_CallFrame* frame) {
  const auto* asked = frame->extension_start;  // its type has other names in other versions of JAX
  if (asked == nullptr || asked->type != XLA_FFI_Extension_Metadata) {
    try {
      run(Call(frame));
    } catch (const std::bad_alloc&) {
      return failure(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "no memory is left");
    } catch (const std::exception& error) {
      return failure(frame, XLA_FFI_Error_Code_INTERNAL, error.what());
    }
  } else {  // XLA asks what the kernel was compiled for
    XLA_FFI_Metadata& about = *reinterpret_cast<const XLA_FFI_Metadata_Extension*>(asked)->metadata;
    about.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR};
    about.traits = 0, about.state_type_id = {};
  }
  return nullptr;
}
