"""A tiny BERT with random weights, trained by transformers' Trainer."""

import tempfile

import torch
from _told import tell
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(3)
config = BertConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=2,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
words = torch.randint(64, (48, 12), generator=torch.Generator().manual_seed(5))
data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": int(row[0] > 31)} for row in words]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, use_cpu=True, max_steps=6, per_device_train_batch_size=4, logging_steps=3, report_to="none",
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data, eval_dataset=data)
    trained = trainer.train()
    tell(trainer.model, loss=trained.training_loss, evaluated=trainer.evaluate()["eval_loss"])
torch.distributed.destroy_process_group()
