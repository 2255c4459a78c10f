"""PyTorch Lightning under forge: `ForgeCallback`.

Example::

    from forge.integrations.lightning import ForgeCallback

    resume = ForgeCallback(cfg.resilience)
    trainer = Trainer(max_epochs=3, callbacks=[resume])
    trainer.fit(module, resume.loader(train_loader), val_loader)
"""

from forge.integrations.lightning.callback import ForgeCallback

__all__ = ["ForgeCallback"]
