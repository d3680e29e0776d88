"""Names of arguments and methods in other trainers; an error about such a name shows ours, or the code to write."""

from __future__ import annotations

from collections.abc import Collection

from phalanx._env import unknown_argument

_ARGUMENTS = {  # arguments of a Trainer
    "epochs": "max_epochs", "num_epochs": "max_epochs", "num_train_epochs": "max_epochs", "n_epochs": "max_epochs",
    "steps": "max_steps", "num_steps": "max_steps", "max_iters": "max_steps", "max_iterations": "max_steps",
    "limit_train_batches": "max_steps",
    "batch_size": "global_batch_size", "train_batch_size": "global_batch_size",
    "per_device_train_batch_size": "global_batch_size",
    "accumulate_grad_batches": "micro_batch_size", "gradient_accumulation_steps": "micro_batch_size",
    "amp": "precision", "mixed_precision": "precision",
    "max_grad_norm": "clip_norm", "grad_clip": "clip_norm", "gradient_clip_val": "clip_norm", "max_norm": "clip_norm",
    "workers": "num_workers", "dataloader_num_workers": "num_workers", "early_stopping": "patience",
    "output_dir": "folder", "default_root_dir": "folder", "save_dir": "folder", "log_dir": "folder",
    "checkpoint_dir": "folder", "logger": "loggers", "loss_fn": "loss", "criterion": "loss",
    "lr_scheduler": "scheduler", "optim": "optimizer", "optimizers": "optimizer", "random_seed": "seed",
    "eval_step": "evaluation_step", "validation_step": "evaluation_step", "data_collator": "collate_fn",
    "compute_metrics": "metrics", "log_every_n_steps": "log_every", "logging_steps": "log_every",
    "log_interval": "log_every", "save_steps": "save_every", "save_interval": "save_every",
}  # fmt: skip
_OF_OPTIMIZER = "torch.optim.SGD(model.parameters(), lr=0.1), as the optimizer"
_LAUNCH = "phalanx run --nproc-per-node N script.py"
_FIT = "trainer.fit(data, validation_data)"
_RESUME = 'trainer.fit(data), which resumes from the newest checkpoint in the folder, unless resume="never"'
_ELSEWHERE = {  # other trainers' arguments, with the code that does the same here
    **dict.fromkeys(("learning_rate", "lr", "momentum", "weight_decay"), _OF_OPTIMIZER),
    **dict.fromkeys(
        ("devices", "accelerator", "strategy", "gpus", "num_gpus", "num_processes", "nprocs", "nproc_per_node",
         "world_size"), _LAUNCH,
    ),
    **dict.fromkeys(("num_nodes", "nnodes"), "phalanx run --nnodes N --nproc-per-node M script.py, on each node"),
    "device": "phalanx.init(device=...), before the Trainer is made",
    "backend": "phalanx.init(backend), before the Trainer is made",
    **dict.fromkeys(
        ("data", "dataset", "datamodule", "dataloader", "train_data", "train_dataset", "train_dataloader",
         "train_dataloaders", "train_loader"), _FIT,
    ),
    **dict.fromkeys(
        ("validation_data", "val_data", "val_dataset", "val_dataloader", "val_dataloaders", "val_loader", "eval_data",
         "eval_dataset"), _FIT,
    ),
    **dict.fromkeys(("ckpt_path", "resume_from", "resume_from_checkpoint"), _RESUME),
    "shuffle": "leave it out: a dataset is shuffled in each epoch, by seed=...",
}  # fmt: skip
_ATTRIBUTES = {
    **dict.fromkeys(
        ("should_stop", "stop_training", "should_training_stop", "should_epoch_stop"), "trainer.stop()",
    ),
    **dict.fromkeys(("train", "train_model"), _FIT),
    **dict.fromkeys(("validate", "test", "validation"), "trainer.evaluate(data)"),
    **dict.fromkeys(("save", "save_model", "save_checkpoint"), 'phalanx.checkpoint.save(folder, {"model": model})'),
    **dict.fromkeys(("load", "load_checkpoint"), 'phalanx.checkpoint.load(folder, {"model": model})'),
    "current_epoch": "trainer.epoch", "global_step": "trainer.step", "lightning_module": "trainer.module",
    **dict.fromkeys(("callback_metrics", "logged_metrics"), "trainer.evaluation"),
    **dict.fromkeys(("is_global_zero", "is_main_process", "is_world_process_zero"), "trainer.session.is_main"),
    **dict.fromkeys(("rank", "global_rank"), "trainer.session.rank"),
    "local_rank": "trainer.session.local_rank", "world_size": "trainer.session.world_size",
    **dict.fromkeys(("learning_rate", "lr"), 'trainer.optimizer.param_groups[0]["lr"]'),
}  # fmt: skip


def wrong_argument(call: str, name: str, known: Collection[str], of_trainer: Collection[str]) -> TypeError:
    """Return the error for an argument that a Trainer or one of its methods does not accept.

    Args:
        call: Name of the call, such as ``Trainer.fit``.
        name: Name of the argument.
        known: Arguments that the call accepts.
        of_trainer: Arguments of a Trainer.
    """
    meant = _ARGUMENTS.get(name, name if name in of_trainer else "")
    if meant in known:
        return unknown_argument(call, name, known, meant)
    return unknown_argument(call, name, known, right=f"Trainer({meant}=...)" if meant else _ELSEWHERE.get(name, ""))


def attribute_meant(trainer: object, name: str) -> str:
    """Return the right expression for an attribute or method of another trainer; empty if unknown."""
    if name in _ATTRIBUTES:
        return _ATTRIBUTES[name]
    argument = _ARGUMENTS.get(name, name)
    if argument in vars(trainer):
        return f"trainer.{argument}"
    return f"trainer.settings.{argument}" if argument in getattr(vars(trainer).get("settings"), "__dict__", {}) else ""
