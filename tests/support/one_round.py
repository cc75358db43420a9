"""A coordinator.toml of one round of FedAvg, without files for new devices."""

ONE_ROUND = """\
federation = "home"
broker = "embedded"
folder = "run"
formats = []
[model]
name = "digits-mlp"
engines = ["onnx"]
[[runs]]
method = "fedavg"
num-rounds = 1
"""
