// The Python module `_native`: int64 buffers in, int64 buffers out, the interpreter lock released in between.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <new>
#include <string_view>

#include "packing.hpp"
#include "plan.hpp"

namespace {

constexpr std::array<std::string_view, 4> kMethods = {"karmarkar_karp", "lpt", "refined", "snake"};
constexpr std::array<std::string_view, 3> kPackers = {"ffd", "kk", "refined"};

// A contiguous buffer of int64, released at the end of its scope.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }

  bool open(PyObject* object, bool writable, const char* name) {
    if (PyObject_GetBuffer(object, &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) < 0) {
      return false;
    }
    const std::string_view format = view_.format == nullptr ? "" : view_.format;
    if (view_.itemsize != 8 || (format != "l" && format != "q")) {
      PyErr_Format(PyExc_TypeError, "%s is no int64 buffer", name);
      return false;
    }
    return true;
  }

  Py_ssize_t size() const { return view_.obj == nullptr ? 0 : view_.len / 8; }
  std::int64_t* data() const { return static_cast<std::int64_t*>(view_.buf); }
  evenrank::Weights weights() const { return {data(), data() + size()}; }
  evenrank::Indices indices() const { return {data(), data() + size()}; }

 private:
  Py_buffer view_{};
};

// Runs `work` without the interpreter lock; false with MemoryError set if it ran out of memory.
template <typename Work>
bool unlocked(const Work& work) {
  bool done = true;
  Py_BEGIN_ALLOW_THREADS;
  try {
    work();
  } catch (const std::bad_alloc&) {
    done = false;
  }
  Py_END_ALLOW_THREADS;
  if (!done) PyErr_NoMemory();
  return done;
}

bool as_int64(PyObject* object, std::int64_t& value) {
  value = PyLong_AsLongLong(object);
  return value != -1 || PyErr_Occurred() == nullptr;
}

bool as_method(PyObject* object, evenrank::Method& method) {
  const char* name = PyUnicode_AsUTF8(object);
  if (name == nullptr) return false;
  for (std::size_t at = 0; at < kMethods.size(); ++at) {
    if (kMethods[at] == name) {
      method = static_cast<evenrank::Method>(at);
      return true;
    }
  }
  PyErr_Format(PyExc_ValueError, "unknown method '%s'", name);
  return false;
}

PyObject* plan(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  constexpr Py_ssize_t kNumArgs = 12;
  if (num_args != kNumArgs) {
    PyErr_Format(PyExc_TypeError, "plan takes %zd arguments, got %zd", kNumArgs, num_args);
    return nullptr;
  }
  Buffer workloads, tokens, home, assignment, loads;
  evenrank::Request request{};
  std::int64_t num_parts, ranks_per_node, shift;
  request.has_cap = args[5] != Py_None;
  if (!workloads.open(args[0], false, "workloads") || !as_int64(args[1], num_parts) ||
      !as_method(args[2], request.method) || (args[4] != Py_None && !tokens.open(args[4], false, "tokens")) ||
      (request.has_cap && !as_int64(args[5], request.max_tokens)) ||
      (args[6] != Py_None && !home.open(args[6], false, "home")) || !as_int64(args[7], ranks_per_node) ||
      !as_int64(args[8], request.slack.mantissa) || !as_int64(args[9], shift) ||
      !assignment.open(args[10], true, "assignment") || !loads.open(args[11], true, "loads")) {
    return nullptr;
  }
  request.equal_size = args[3] == Py_True;
  const Py_ssize_t num_rows = workloads.size();
  if (num_rows < 1 || num_rows > INT32_MAX || num_parts < 1 || num_parts > INT32_MAX ||
      assignment.size() != num_rows || loads.size() != num_parts || ranks_per_node < 1 ||
      (tokens.size() != num_rows && (args[4] != Py_None || request.has_cap)) ||
      (args[6] != Py_None && home.size() != num_rows)) {
    PyErr_SetString(PyExc_ValueError, "plan takes checked arguments: sizes do not match");
    return nullptr;
  }
  request.num_parts = static_cast<evenrank::Index>(num_parts);
  request.ranks_per_node = static_cast<evenrank::Index>(std::min<std::int64_t>(ranks_per_node, num_parts));
  request.slack.shift = static_cast<int>(shift);
  evenrank::Weight bound = 0;
  evenrank::Weight most_tokens = 0;
  const bool done = unlocked([&] {
    request.workloads = workloads.weights();
    request.tokens = tokens.weights();
    request.home = home.indices();
    const evenrank::Plan plan = evenrank::make_plan(request);
    std::copy(plan.assignment.begin(), plan.assignment.end(), assignment.data());
    std::copy(plan.loads.begin(), plan.loads.end(), loads.data());
    bound = plan.bound;
    most_tokens = plan.most_tokens;
  });
  return done ? Py_BuildValue("(LL)", bound, most_tokens) : nullptr;
}

PyObject* lower_bound(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  if (num_args != 3) {
    PyErr_Format(PyExc_TypeError, "lower_bound takes 3 arguments, got %zd", num_args);
    return nullptr;
  }
  Buffer workloads;
  std::int64_t num_parts;
  if (!workloads.open(args[0], false, "workloads") || !as_int64(args[1], num_parts)) return nullptr;
  if (workloads.size() < 1 || workloads.size() > INT32_MAX || num_parts < 1 || num_parts > INT32_MAX) {
    PyErr_SetString(PyExc_ValueError, "lower_bound takes checked arguments: at least one row and partition");
    return nullptr;
  }
  const bool equal_size = args[2] == Py_True;
  evenrank::Weight bound = 0;
  const bool done = unlocked([&] {
    const auto problem =
        evenrank::Problem::of(workloads.weights(), static_cast<evenrank::Index>(num_parts), equal_size);
    bound = evenrank::counting_bound(problem.weights, problem.num_parts, problem.limits).load;
  });
  return done ? PyLong_FromLongLong(bound) : nullptr;
}

bool as_packer(PyObject* object, evenrank::Packer& packer) {
  const char* name = PyUnicode_AsUTF8(object);
  if (name == nullptr) return false;
  for (std::size_t at = 0; at < kPackers.size(); ++at) {
    if (kPackers[at] == name) {
      packer = static_cast<evenrank::Packer>(at);
      return true;
    }
  }
  PyErr_Format(PyExc_ValueError, "unknown packing algorithm '%s'", name);
  return false;
}

PyObject* as_list(const evenrank::Indices& indices) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(indices.size()));
  if (list == nullptr) return nullptr;
  for (std::size_t at = 0; at < indices.size(); ++at) {
    PyObject* index = PyLong_FromLong(indices[at]);
    if (index == nullptr) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SET_ITEM(list, at, index);
  }
  return list;
}

PyObject* pack(PyObject*, PyObject* const* args, Py_ssize_t num_args) {
  constexpr Py_ssize_t kNumArgs = 6;
  if (num_args != kNumArgs) {
    PyErr_Format(PyExc_TypeError, "pack takes %zd arguments, got %zd", kNumArgs, num_args);
    return nullptr;
  }
  Buffer values;
  evenrank::PackRequest request{};
  if (!values.open(args[0], false, "values") || !as_int64(args[1], request.capacity) ||
      !as_packer(args[2], request.packer) || !as_int64(args[3], request.min_groups) ||
      !as_int64(args[4], request.divisor)) {
    return nullptr;
  }
  request.equal_size = args[5] == Py_True;
  if (values.size() < 1 || values.size() > INT32_MAX || request.capacity < 1 || request.min_groups < 1 ||
      request.min_groups > values.size() || request.divisor < 1 || request.divisor > values.size()) {
    PyErr_SetString(PyExc_ValueError, "pack takes checked arguments: at least one row, and no more groups than rows");
    return nullptr;
  }
  std::vector<evenrank::Indices> groups;
  if (!unlocked([&] {
        request.values = values.weights();
        groups = evenrank::pack(request);
      })) {
    return nullptr;
  }
  if (groups.empty()) Py_RETURN_NONE;
  PyObject* result = PyList_New(static_cast<Py_ssize_t>(groups.size()));
  if (result == nullptr) return nullptr;
  for (std::size_t at = 0; at < groups.size(); ++at) {
    PyObject* group = as_list(groups[at]);
    if (group == nullptr) {
      Py_DECREF(result);
      return nullptr;
    }
    PyList_SET_ITEM(result, at, group);
  }
  return result;
}

PyMethodDef functions[] = {
    {"plan", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(plan)), METH_FASTCALL,
     "plan(workloads, num_parts, method, equal_size, tokens, max_tokens, home, ranks_per_node, slack_mantissa,\n"
     "     slack_shift, assignment, loads) -> (bound, most_tokens)\n\n"
     "Plan, and fill the int64 buffers `assignment` and `loads`. Arguments are checked by the caller."},
    {"lower_bound", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(lower_bound)), METH_FASTCALL,
     "lower_bound(workloads, num_parts, equal_size) -> int\n\nLower bound of the largest load."},
    {"pack", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pack)), METH_FASTCALL,
     "pack(values, capacity, algorithm, min_groups, divisor, equal_size) -> list[list[int]] | None\n\n"
     "Groups of indices under a capacity, heaviest first. Arguments are checked by the caller."},
    {nullptr, nullptr, 0, nullptr},
};

int add_constants(PyObject* module) {
  if (PyModule_AddIntConstant(module, "PLANS", evenrank::kPlans) < 0) return -1;
  if (PyModule_AddIntConstant(module, "PACKINGS", evenrank::kPackings) < 0) return -1;
  PyObject* names = PyTuple_New(kMethods.size());
  if (names == nullptr) return -1;
  for (std::size_t at = 0; at < kMethods.size(); ++at) {
    PyObject* name = PyUnicode_FromStringAndSize(kMethods[at].data(), kMethods[at].size());
    if (name == nullptr) {
      Py_DECREF(names);
      return -1;
    }
    PyTuple_SET_ITEM(names, at, name);
  }
  const int result = PyModule_AddObjectRef(module, "METHODS", names);
  Py_DECREF(names);
  return result;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(add_constants)},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "The planner in C++; the same plans as the reference.", 0, functions, slots,
    nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&definition); }
