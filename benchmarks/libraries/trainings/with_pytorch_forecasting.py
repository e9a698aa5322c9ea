"""PyTorch Forecasting: a temporal fusion transformer under Lightning, clipping, validation after each epoch."""

import lightning.pytorch as lightning
import numpy as np
import pandas as pd
import truth
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet


class Steps(lightning.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, number):
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        truth.step(rate, loss=outputs["loss"].item(), samples=len(batch[0]["encoder_cont"]))

    def on_validation_epoch_start(self, trainer, module):
        if not trainer.sanity_checking:
            truth.evaluated()


truth.seed()
values = np.random.default_rng(1).standard_normal(240).cumsum()
table = pd.DataFrame({"time": np.tile(np.arange(60), 4), "series": np.repeat(list("abcd"), 60), "value": values})
columns = {"time_idx": "time", "target": "value", "group_ids": ["series"], "time_varying_unknown_reals": ["value"]}
training = TimeSeriesDataSet(table[table.time < 50], max_encoder_length=12, max_prediction_length=4, **columns)
evaluation = TimeSeriesDataSet.from_dataset(training, table, predict=True, stop_randomization=True)
model = TemporalFusionTransformer.from_dataset(
    training, learning_rate=0.01, hidden_size=8, attention_head_size=1, hidden_continuous_size=4, loss=QuantileLoss()
)
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", gradient_clip_val=0.1, limit_train_batches=6, callbacks=[Steps()], **quiet
)
loader = training.to_dataloader(train=True, batch_size=16, num_workers=0)
trainer.fit(model, loader, evaluation.to_dataloader(train=False, batch_size=16, num_workers=0))
truth.end(model)
