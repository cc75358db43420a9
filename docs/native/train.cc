// Trains a compiled program with ONNX Runtime's C++ API alone: SGD with momentum, then the accuracy on the samples.
//
//   train STEP.onnx EVALUATE.onnx WEIGHTS X Y OUT [steps [batch [lr [momentum]]]]
//
// WEIGHTS and OUT are the model's flat vector, X the samples, all float32 little-endian; Y has one byte per sample, its
// class. The tensors of a step lie in this order (program.json lists them by name and shape):
//
//   in:  w/..., buffers/..., velocity/..., anchor/..., linear/..., x, y, q, lr, momentum, mu
//   out: w/..., buffers/..., velocity/..., loss
//
// So output i is input i of the next step, and the vector is what lies before velocity/. `evaluate` takes w/...,
// buffers/..., x, y and gives loss [batch] and logits [batch, classes].
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

static std::vector<char> bytes(const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(std::string("cannot read ") + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

static std::vector<float> floats(const char* path) {
  auto raw = bytes(path);
  auto first = reinterpret_cast<const float*>(raw.data());
  return {first, first + raw.size() / sizeof(float)};
}

struct Function {  // one .onnx file: its ports in order, and an array for each input
  Ort::Session session;
  std::vector<std::string> inputs, outputs;
  std::map<std::string, std::vector<int64_t>> shapes;
  std::map<std::string, std::vector<float>> values;

  Function(Ort::Env& env, const char* path, const Ort::SessionOptions& options, int64_t batch)
      : session(env, path, options) {
    Ort::AllocatorWithDefaultOptions memory;
    for (size_t i = 0; i < session.GetInputCount(); ++i) {
      std::string name = session.GetInputNameAllocated(i, memory).get();
      auto shape = session.GetInputTypeInfo(i).GetTensorTypeAndShapeInfo().GetShape();
      size_t size = 1;
      for (auto& d : shape) size *= (d = d < 0 ? batch : d);  // the one open dimension is the batch
      inputs.push_back(name), shapes[name] = shape, values[name].assign(size, 0.0f);
    }
    for (size_t i = 0; i < session.GetOutputCount(); ++i)
      outputs.push_back(session.GetOutputNameAllocated(i, memory).get());
  }

  std::vector<Ort::Value> run() {
    auto cpu = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    std::vector<const char*> in, out;
    std::vector<Ort::Value> given;
    for (auto& name : inputs) {
      auto &value = values[name];
      auto &shape = shapes[name];
      in.push_back(name.c_str());
      given.push_back(Ort::Value::CreateTensor<float>(cpu, value.data(), value.size(), shape.data(), shape.size()));
    }
    for (auto& name : outputs) out.push_back(name.c_str());
    return session.Run({}, in.data(), given.data(), in.size(), out.data(), out.size());
  }
};

static bool begins(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

// The tensors of the flat vector, in or out.
static void move_vector(Function& f, std::vector<float>& flat, bool in) {
  auto at = flat.begin();
  for (auto& name : f.inputs) {
    if (!begins(name, "w/") && !begins(name, "buffers/")) continue;
    auto& value = f.values[name];
    if (in && flat.end() - at < static_cast<std::ptrdiff_t>(value.size())) throw std::runtime_error("WEIGHTS is short");
    if (in) std::copy_n(at, value.size(), value.begin()), at += value.size();
    else flat.insert(flat.end(), value.begin(), value.end());
  }
}

// Samples from `first` on, around the end; a label is a row of zeros with a one.
static void fill(Function& f, const std::vector<float>& x, const std::vector<char>& y, size_t first, size_t batch) {
  auto &xs = f.values["x"], &ys = f.values["y"];
  size_t width = xs.size() / batch, classes = ys.size() / batch;
  std::fill(ys.begin(), ys.end(), 0.0f);
  for (size_t row = 0; row < batch; ++row) {
    size_t i = (first + row) % y.size();
    std::copy_n(x.begin() + i * width, width, xs.begin() + row * width);
    ys.at(row * classes + static_cast<unsigned char>(y[i])) = 1.0f;
  }
}

int main(int argc, char** argv) try {
  if (argc < 7) return std::fprintf(stderr, "usage: train STEP EVALUATE WEIGHTS X Y OUT [steps batch lr momentum]\n"), 2;
  auto option = [&](int i, double otherwise) { return argc > i ? std::atof(argv[i]) : otherwise; };
  size_t steps = option(7, 10), batch = option(8, 32);
  setenv("ORT_DISABLE_TELEMETRY", "1", 1);  // recent builds send reports to their maker
  Ort::Env env(ORT_LOGGING_LEVEL_ERROR, "train");
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(1).DisableMemPattern();
  auto x = floats(argv[4]);
  auto y = bytes(argv[5]);
  auto weights = floats(argv[3]);

  Function step(env, argv[1], options, batch), evaluate(env, argv[2], options, 1);
  move_vector(step, weights, true);
  step.values["lr"] = {static_cast<float>(option(9, 0.05))};
  step.values["momentum"] = {static_cast<float>(option(10, 0.9))};
  std::fill(step.values["q"].begin(), step.values["q"].end(), 1.0f / batch);  // the mean over the batch
  for (size_t k = 0; k < steps; ++k) {
    fill(step, x, y, k * batch, batch);
    auto made = step.run();
    for (size_t i = 0; i + 1 < made.size(); ++i) {
      auto& value = step.values[step.inputs[i]];
      std::copy_n(made[i].GetTensorData<float>(), value.size(), value.begin());
    }
    std::printf("step %zu loss %.9g\n", k, *made.back().GetTensorData<float>());
  }

  std::vector<float> trained;
  move_vector(step, trained, false);
  std::ofstream(argv[6], std::ios::binary)
      .write(reinterpret_cast<const char*>(trained.data()), trained.size() * sizeof(float));
  move_vector(evaluate, trained, true);
  size_t right = 0, classes = evaluate.values["y"].size();
  for (size_t i = 0; i < y.size(); ++i) {
    fill(evaluate, x, y, i, 1);
    auto made = evaluate.run();
    auto logits = made.back().GetTensorData<float>();
    right += std::max_element(logits, logits + classes) - logits == static_cast<unsigned char>(y[i]);
  }
  std::printf("accuracy %zu of %zu\n", right, y.size());
} catch (const std::exception& wrong) {
  return std::fprintf(stderr, "train: %s\n", wrong.what()), 1;
}
