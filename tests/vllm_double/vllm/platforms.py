class Platform:
    """A device on which engines can sleep."""

    @classmethod
    def get_device_capability(cls, device_id=0):
        return None

    def is_cpu(self) -> bool:
        return False

    def is_sleep_mode_available(self) -> bool:
        return True


current_platform = Platform()
