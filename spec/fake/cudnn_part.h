/* cudnn_part.h: descriptors of the fake cuDNN as attributes by name, and the tensors they say.
 *
 * Invariant: a part that is not there any more is found as nullptr, and complained of.
 * To add a type of attribute: its size in size_of.
 */
#ifndef ORR_FAKE_CUDNN_PART_H
#define ORR_FAKE_CUDNN_PART_H

#include <map>
#include <memory>
#include <vector>

#include "include/cudnn.h"

#include "device.h"
#include "fake.h"
#include "number.h"

namespace orr_fake_dnn_parts {

const char *const a_part = "a descriptor of cuDNN";

struct Part {
  cudnnBackendDescriptorType_t type;
  bool final;
  int engine;  /* of a configuration or an engine */
  Part *graph; /* of those */
  std::map<int, std::vector<char>> attributes;
  template <typename T>
  std::vector<T> list(int name) const {
    auto found = attributes.find(name);
    if (found == attributes.end()) return {};
    const T *p = (const T *)found->second.data();
    return std::vector<T>(p, p + found->second.size() / sizeof(T));
  }
  template <typename T>
  T one(int name) const {
    std::vector<T> all = list<T>(name);
    return all.empty() ? T() : all[0];
  }
};

inline size_t size_of(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR: return 8;
    case CUDNN_TYPE_BOOLEAN: return sizeof(bool);
    default: return 4;
  }
}

struct Tensor {
  orr_fake_type type;
  std::vector<int64_t> dims, strides;
  char *data;
  int64_t alignment;
  bool tf32;
  double get(int64_t a, int64_t b, int64_t c, int64_t d) const {
    int64_t at = a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3];
    double x = orr_fake_get(data, type, at);
    return tf32 && type == FAKE_F32 ? orr_fake_tf32(x) : x;
  }
  size_t bytes() const {
    int64_t last = 0;
    for (size_t k = 0; k < 4; k++) last += (dims[k] - 1) * strides[k];
    return (size_t)(last + 1) * orr_fake_size(type);
  }
  void put(int64_t a, int64_t b, int64_t c, int64_t d, double x) const {
    orr_fake_put(data, type, a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3],
                 x);
  }
};

inline orr_fake_type type_of(cudnnDataType_t t) {
  return t == CUDNN_DATA_DOUBLE     ? FAKE_F64
         : t == CUDNN_DATA_HALF     ? FAKE_F16
         : t == CUDNN_DATA_BFLOAT16 ? FAKE_BF16
         : t == CUDNN_DATA_INT32    ? FAKE_I32
         : t == CUDNN_DATA_BOOLEAN  ? FAKE_U8
                                    : FAKE_F32;
}

inline Part *part_at(cudnnBackendDescriptor_t p) {
  return orr_fake_is(p, a_part) ? (Part *)p : nullptr;
}

/* The part that another names, if it is still there. */
inline Part *inner(const Part *part, int name) {
  Part *named = part ? part->one<Part *>(name) : nullptr;
  return named ? part_at(named) : nullptr;
}

inline Tensor tensor_of(const Part *part, const Part *pack) {
  std::vector<int64_t> uids = pack->list<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  std::vector<char *> data = pack->list<char *>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  Tensor t = {type_of(part->one<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE)),
              part->list<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS),
              part->list<int64_t>(CUDNN_ATTR_TENSOR_STRIDES),
              nullptr,
              part->one<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT),
              false};
  int64_t uid = part->one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID);
  for (size_t k = 0; k < uids.size() && k < data.size(); k++)
    if (uids[k] == uid) t.data = data[k];
  return t;
}

inline bool is_there(int device, const Tensor &t, const char *who) {
  if (!orr_fake_may_use(device, t.data, t.bytes(), who)) return false;
  if ((uintptr_t)t.data % (uintptr_t)t.alignment == 0) return true;
  orr_fake_complain("%s is not aligned as its descriptor says", who);
  return false;
}

} // namespace orr_fake_dnn_parts

#endif
