"""List the private names of accelerate and transformers that the apps use or replace; see ``protocol/compat.py``.

It is not in the app's package, whose import needs these names.
"""

from __future__ import annotations

from ddip.protocol.compat import Names

_STATE = "accelerate.state"
ACCELERATE = Names(
    "accelerate",
    "1.15",
    core=(
        f"{_STATE}.AcceleratorState._known_attrs",
        f"{_STATE}.AcceleratorState._reset_state",
        f"{_STATE}.AcceleratorState._shared_state",
        f"{_STATE}.GradientState._shared_state",
        f"{_STATE}.PartialState._known_attrs",
        f"{_STATE}.PartialState._shared_state",
        "accelerate.launchers.notebook_launcher",
        "accelerate.utils.patch_environment",
    ),
)
TRANSFORMERS = Names(
    "transformers",
    "5.24",
    core=(
        "transformers.modeling_utils.PreTrainedModel.from_pretrained",
        "transformers.trainer.DEFAULT_PROGRESS_CALLBACK",
        "transformers.trainer.Trainer.create_accelerator_and_postprocess",
        "transformers.training_args.TrainingArguments.__post_init__",
        "transformers.training_args.TrainingArguments._setup_devices",
        "transformers.utils.notebook.NotebookProgressCallback",
    ),
)
BY_MODULE = {"accelerate.state": ACCELERATE, "transformers.trainer": TRANSFORMERS}
"""Private names by a module that is imported if the library can be used."""
