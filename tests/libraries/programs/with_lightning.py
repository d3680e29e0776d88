"""Lightning's Trainer."""

import lightning
import torch
from _told import model, samples, tell


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()

    def training_step(self, batch, index):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
net = Net()
trainer.fit(net, torch.utils.data.DataLoader(samples(), batch_size=4))
tell(net, loss=float(trainer.callback_metrics["loss"]))
