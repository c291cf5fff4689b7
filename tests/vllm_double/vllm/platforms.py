class Platform:
    """A device on which engines can sleep."""

    overridden = 0

    @classmethod
    def get_device_capability(cls, device_id=0):
        return None

    def register_triton_kernel_overrides(self) -> None:
        Platform.overridden += 1

    def is_cpu(self) -> bool:
        return False

    def is_sleep_mode_available(self) -> bool:
        return True


current_platform = Platform()
