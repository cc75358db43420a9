"""What each key of a simulated run means, in the words that the command line and `init` print. Imports nothing."""

from __future__ import annotations

HELP = {
    "method": "A method by name, or package.module:Class.",
    "data-set": "What the devices hold: a data set by name, or package.module:ENTRY.",
    "model": "A model by name, or package.module:factory; the data set's own.",
    "partition": "How the devices share the data, as dirichlet:alpha=0.1; the data set's own.",
    "devices": "How many devices; as many as suit the data set.",
    "groups": "How many true groups the partition makes.",
    "num-rounds": "Training rounds.",
    "seed": "Cuts the data and draws every random number.",
    "engine": "auto: the fastest here; lean (CPU), stacked or graphs (GPU); or onnx, litert, pt2, as devices run it.",
    "data": "The folder of data sets; else FEDCENTERS_DATA.",
    "workers": "Processes that share the devices' work.",
    "broker": "Play it over MQTT, with real processes: auto, mosquitto, embedded, or a URL like mqtt://host:1883.",
    "ray": "A Ray cluster that does the work, as host:port; or auto.",
    "profiles": "A TOML file of kinds of devices; see emulator/simulation/profile_files.py.",
    "codec": "How updates travel: f32, f16, or i8 as over MQTT.",
    "hostile": "What a share of the devices does, as sign-flip:0.2.",
    "evaluate-every": "Rounds from one test to the next; the last has one.",
    "fraction-evaluate": "Share of the devices in a test; in the last round all.",
    "checkpoint-every": "Rounds from one checkpoint to the next, for --resume; 0 keeps none.",
    "loggers": "Who is told of each round, as tensorboard,mlflow; see docs/runs.md.",
    "out": "The run's own folder is made in here.",
    "name": "Of the run's folder; made from the method and the seed.",
}
