{{- define "tidegate.labels" -}}
{{ include "tidegate.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "tidegate.selector" -}}
app.kubernetes.io/name: tidegate
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{/* Takes root and image; a digest is exact, so it stands alone. */}}
{{- define "tidegate.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "tidegate.remoteTier" -}}
{{- if eq (empty .hostPath) (empty .claimName) -}}
{{- fail (printf "tiers.remote: tier %q must have exactly one of hostPath and claimName." .name) -}}
{{- end -}}
{{- end }}

{{/* What the schema cannot say: names and paths are unique. */}}
{{- define "tidegate.checkTiers" -}}
{{- range $side, $tiers := .Values.tiers -}}
{{- $names := list -}}
{{- $paths := list -}}
{{- range $tiers -}}
{{- if has .name $names -}}
{{- fail (printf "tiers.%s: the name %q is given twice; each tier needs its own." $side .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- with .path | default .hostPath -}}
{{- if has . $paths -}}
{{- fail (printf "tiers.%s: the path %q is given twice; each tier needs its own." $side .) -}}
{{- end -}}
{{- $paths = append $paths . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.tiers.remote }}{{ include "tidegate.remoteTier" . }}{{ end -}}
{{- end }}

{{- define "tidegate.config" -}}
{{- include "tidegate.checkTiers" . -}}
{{- $defaults := dict "requireMountPoint" false "maxUsePercent" 80 "gid" 64738 "orphanTTL" "168h" -}}
{{- $local := list -}}
{{- range .Values.tiers.local -}}
{{- $local = append $local (merge (dict) . $defaults) -}}
{{- end -}}
{{- $sidecar := dict
  "image" (include "tidegate.image" (dict "root" . "image" .Values.sidecar.image))
  "pullPolicy" .Values.image.pullPolicy
  "resources" (.Values.sidecar.resources | default dict) -}}
{{- $drain := pick .Values.drain "enabled" "maxHoldLimit" "allowBlock" "releaseTTL" "contactTimeout" -}}
{{- dict
  "namespace" .Release.Namespace
  "gate" (dict "service" "tidegate-gate" "secret" "tidegate-gate-tls" "port" 8443)
  "anchor" "tidegate-anchor"
  "webhooks" (dict "mutating" "tidegate-inject" "validating" "tidegate-evict")
  "lease" "tidegate-controller"
  "tiers" (dict "local" $local "remote" (.Values.tiers.remote | default list))
  "sidecar" $sidecar
  "drain" $drain
  "certs" (dict "mode" "operator" "caDuration" .Values.certs.caDuration "duration" .Values.certs.duration)
  "nodeAnnotations" (dict "enabled" .Values.nodeAnnotations.enabled)
  | toPrettyJson -}}
{{- end }}

{{/* No version labels here: an upgrade that changes nothing of a pod shall not restart it. The mesh
label keeps a proxy from standing before our TLS. */}}
{{- define "tidegate.podMetadata" -}}
metadata:
  labels:
    {{- include "tidegate.selector" . | nindent 4 }}
    sidecar.istio.io/inject: "false"
  annotations:
    checksum/config: {{ include "tidegate.config" .root | sha256sum }}
{{- end }}

{{/* Of every pod spec: what does not differ between our three. */}}
{{- define "tidegate.podSpec" -}}
serviceAccountName: tidegate-{{ .component }}
# Their variables would look like ours: TIDEGATE_GATE_PORT.
enableServiceLinks: false
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.global.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tidegate.restrictedPod" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tidegate.restrictedContainer" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* A start may take long on a busy node; after that, a hung process costs half a minute. */}}
{{- define "tidegate.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 1
  failureThreshold: 120
livenessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: http}
  periodSeconds: 2
  timeoutSeconds: 2
{{- end }}

{{/* The root is read-only; libraries expect one place that is not. */}}
{{- define "tidegate.commonMounts" -}}
- {name: config, mountPath: /etc/tidegate, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "tidegate.commonVolumes" -}}
- name: config
  configMap: {name: tidegate-config}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: 16Mi}
{{- end }}
