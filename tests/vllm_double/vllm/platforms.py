class Platform:
    """A device on which engines can sleep."""

    def get_device_capability(self, device_id=0):
        return None

    def is_cpu(self) -> bool:
        return False

    def is_sleep_mode_available(self) -> bool:
        return True


current_platform = Platform()
