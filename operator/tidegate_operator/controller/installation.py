"""Keeps the release's own objects right: certificate, CA bundle, webhook namespaces, owners.

Called by `controller.reconcile`, once a minute and when a policy comes or goes: nobody else may
watch those objects for us, as the account has rights on them by name only.
"""

import logging
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from tidegate_contract.errors import Retry
from tidegate_operator.controller.certs import (
    BUNDLE,
    CertsAction,
    Lifetimes,
    build_certs,
    decide_certs,
    parse_certs,
    serving_names,
)
from tidegate_operator.controller.context import Context
from tidegate_operator.controller.objects import MANAGER, Owner
from tidegate_operator.controller.webhooks import (
    build_namespace_selector,
    decide_owner_patch,
    decide_webhook_patch,
)
from tidegate_operator.kube.client import STRATEGIC_PATCH
from tidegate_operator.kube.errors import NotFound
from tidegate_operator.kube.kinds import (
    CLUSTER_ROLES,
    MUTATING_WEBHOOKS,
    NAMESPACES,
    SECRETS,
    VALIDATING_WEBHOOKS,
    Kind,
)
from tidegate_operator.settings import CertsMode

PERIOD = timedelta(minutes=1)

logger = logging.getLogger(__name__)


class Installation:
    """The objects of the release that are not made by the chart alone."""

    def __init__(self, context: Context) -> None:
        """Touches nothing yet."""
        self._client = context.client
        self._settings = context.settings
        self._world = context.world
        self._metrics = context.metrics
        certs = context.settings.certs
        self._lifetimes = Lifetimes(authority=certs.ca_duration, serving=certs.duration)

    async def reconcile(self, now: datetime) -> timedelta:
        """One pass; gives the time after which to look again.

        Args:
            now: aware UTC.

        Raises:
            Retry: an object of the release is missing, or the API server refused for now.
        """
        bundle = await self._certificates(now)
        names = self._settings.webhooks
        await self._webhook(MUTATING_WEBHOOKS, names.mutating, bundle, None)
        # Not before all policies are known: a shorter list would stop the webhook where it is used.
        selector = (
            build_namespace_selector(key.namespace for key in self._world.policies)
            if self._world.is_synced
            else None
        )
        await self._webhook(VALIDATING_WEBHOOKS, names.validating, bundle, selector)
        await self._owners()
        return PERIOD

    async def _webhook(
        self, kind: Kind, name: str, bundle: str, selector: Mapping[str, Any] | None
    ) -> None:
        found = await self._get(kind, name)
        await self._patch(kind, name, decide_webhook_patch(found, bundle, selector))

    async def _owners(self) -> None:
        """Ties what has no namespace to the release's, so that all of it goes with that one."""
        namespace = self._settings.namespace
        found = await self._get(NAMESPACES, namespace)
        owner = Owner(kind=NAMESPACES, name=namespace, uid=found["metadata"]["uid"])
        for kind, name in (
            (MUTATING_WEBHOOKS, self._settings.webhooks.mutating),
            (VALIDATING_WEBHOOKS, self._settings.webhooks.validating),
            (CLUSTER_ROLES, self._settings.anchor),
        ):
            owned = await self._get(kind, name)
            await self._patch(kind, name, decide_owner_patch(owned, owner))

    async def _certificates(self, now: datetime) -> str:
        """The CA bundle, base64; empty while somebody else has not made it yet."""
        settings = self._settings
        secret = await self._get(SECRETS, settings.gate.secret, settings.namespace)
        data = secret.get("data") or {}
        if settings.certs.mode is not CertsMode.OPERATOR:
            return str(data.get(BUNDLE, ""))
        certs = parse_certs(data)
        names = serving_names(settings.gate.service, settings.namespace)
        decision = decide_certs(certs, names, self._lifetimes, now)
        if decision.action is CertsAction.KEEP:
            return str(data[BUNDLE])
        changed = build_certs(decision, certs, names, self._lifetimes, now)
        # Conditional: two writers would leave a key that fits no certificate.
        version = secret["metadata"]["resourceVersion"]
        await self._client.patch(
            SECRETS.path(settings.namespace, settings.gate.secret),
            {"metadata": {"resourceVersion": version}, "data": changed},
            manager=MANAGER,
        )
        self._metrics.writes.labels("secret").inc()
        logger.info(
            "certificates renewed", extra={"action": decision.action, "reason": decision.reason}
        )
        return changed.get(BUNDLE) or str(data[BUNDLE])

    async def _get(self, kind: Kind, name: str, namespace: str = "") -> dict[str, Any]:
        try:
            return await self._client.get(kind.path(namespace, name))
        except NotFound as error:
            raise Retry(f"{kind.kind} {name} of the release is missing") from error

    async def _patch(self, kind: Kind, name: str, patch: Mapping[str, Any] | None) -> None:
        if patch is None:
            return
        await self._client.patch(
            kind.path(name=name), patch, media_type=STRATEGIC_PATCH, manager=MANAGER
        )
        self._metrics.writes.labels(kind.kind.lower()).inc()
        logger.info("installation repaired", extra={"kind": kind.kind, "object": name})
