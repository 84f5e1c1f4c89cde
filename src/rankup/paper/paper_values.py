"""The paper's figures, in per cent and in millions of parameters. None: it prints no figure."""

STREAMS = {
    "p-mnist": "P-MNIST",
    "r-mnist": "R-MNIST",
    "s-cifar100": "S-CIFAR100",
    "s-miniimagenet": "S-miniImageNet",
}

# Average accuracy after 20 tasks with the three-layer MLP, in the order of STREAMS.
ACCURACY: dict[str, tuple[float | None, ...]] = {
    "ewc": (67.9, 44.5, 52.7, 29.3),
    "icarl": (85.4, 51.2, 56.9, 39.9),
    "agem": (73.9, 53.4, 51.3, 31.3),
    "hat": (90.1, 89.1, 64.8, 47.0),
    "packnet": (90.0, 88.4, 63.7, 45.1),
    "orthog": (86.6, 80.2, 57.8, 38.1),
    "nscl": (None, None, 64.26, 47.32),
    "ibpwf": (None, None, 53.22, 40.52),
    "rank": (85.6, 91.1, 65.9, 54.7),
    "parallel 2": (65.3, 65.5, 62.8, 55.4),
    "parallel 4": (86.3, 87.4, 65.6, 58.6),
    "parallel full": (95.9, 97.3, 73.1, 63.1),
    "multitask": (96.8, 97.7, 16.4, 4.21),
}

FORGETTING: dict[str, tuple[float | None, ...]] = {
    "ewc": (25.8, 52.9, 6.96, 17.3),
    "agem": (19.6, 44.2, 21.5, 18.8),
    "orthog": (4.49, 14.7, 6.30, 9.98),
    "nscl": (None, None, 8.5, 11.23),
    "hat": (0, 0, 0, 0),
    "packnet": (0, 0, 0, 0),
    "ibpwf": (0, 0, 0, 0),
    "rank": (0, 0, 0, 0),
    "parallel full": (0, 0, 0, 0),
}

# Parameters and replay buffer on S-CIFAR100, in millions.
MEMORY = {
    "rank": (0.17, 0.0),
    "ibpwf": (0.23, 0.0),
    "ewc": (0.93, 1.71),
    "agem": (1.76, 7.90),
    "orthog": (2.82, 9.01),
    "nscl": (0.88, 0.0),
    "parallel full": (19.7, 0.0),
}

# Parameters of the methods that never forget, in millions: MNIST, S-CIFAR100, S-miniImageNet.
MASKS = {"hat": (0.33, 0.89, 5.51), "packnet": (0.26, 0.83, 5.50), "rank": (0.11, 0.17, 0.72)}

# Accuracy and parameters in millions for first rank and increment: P-MNIST, R-MNIST.
RANKS = {
    "1,1": (74.23, 81.57, 0.09),
    "6,1": (82.21, 89.39, 0.10),
    "11,1": (85.61, 91.09, 0.11),
    "11,2": (90.51, 92.76, 0.14),
    "11,4": (93.84, 94.12, 0.20),
}

# Accuracy and forgetting with ResNet18: S-CIFAR100, then S-miniImageNet.
RESNET18: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "ewc": ((43.2, 26), (34.8, 24)),
    "icarl": ((46.4, 16), (44.2, 24.64)),
    "agem": ((60.34, 11.0), (42.3, 17)),
    "er-ring": ((59.6, 0.14), (49.8, 12)),
    "orthog": ((63.42, 8.37), (51.4, 10)),
    "nscl": ((74.31, 9.47), (57.92, 13.42)),
    "ibpwf": ((68.25, 0), (55.84, 0)),
    "rank": ((68.46, 0), (59.26, 0)),
    "parallel full": ((92.7, 0), (94.5, 0)),
    "multitask": ((70.2, 0), (65.1, 0)),
}

# Accuracy on S-CIFAR100 with ResNet18 when the last 1 to 5 layers are learned.
LAST_LAYERS = (34.38, 34.99, 53.41, 57.08, 65.03)
