"""Handwritten digits: scikit-learn's own, or MNIST from a folder of IDX files."""

import gzip
import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset


def read_idx(folder, name):
    """Return the array in `folder`'s IDX file `name`, plain or gzipped; None if there is none."""
    for path, opener in ((Path(folder, name), open), (Path(folder, f"{name}.gz"), gzip.open)):
        if path.exists():
            with opener(path, "rb") as file:
                data = bytearray(file.read())
            shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
            values = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
            return torch.from_numpy(values.reshape(shape))
    return None


def load_part(folder, part):
    """Return MNIST's "train" or "t10k" as images (N, 1, 28, 28) in [0, 1] and labels (N,)."""
    images = read_idx(folder, f"{part}-images-idx3-ubyte")
    labels = read_idx(folder, f"{part}-labels-idx1-ubyte")
    return None if images is None or labels is None else (images[:, None] / 255, labels.long())


def load_data(folder):
    """Return the training and the test set; a lone set is split four to one."""
    if folder is None:
        digits = load_digits()  # 1,797 images of 8x8, inside scikit-learn
        parts = [(torch.tensor(digits.images[:, None] / 16).float(), torch.tensor(digits.target))]
    else:
        parts = [part for name in ("train", "t10k") if (part := load_part(folder, name))]
    if not parts:
        sys.exit(f"--data {folder}: no {{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte[.gz] there")
    if len(parts) == 1:
        images, labels = parts[0]
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        cut = len(labels) * 4 // 5
        parts = [(images[some], labels[some]) for some in (order[:cut], order[cut:])]
    return [TensorDataset(*part) for part in parts]
