"""Progress bars that tests can look at."""


class FakeBar:
    """Stands in for rich's bar and records its calls."""

    made: list["FakeBar"] = []  # noqa: RUF012
    task_ids = (0,)

    def __init__(self, **options: object) -> None:
        self.completed: list[int] = []
        self.made.append(self)

    def add_task(self, title: str, total: int) -> None:
        self.title, self.total = title, total

    def start(self) -> None: ...

    def stop(self) -> None:
        self.stopped = True

    def update(self, task: int, completed: int) -> None:
        self.completed.append(completed)
