class JobConfig:
    def __init__(self, metadata=None):
        self.metadata = metadata
