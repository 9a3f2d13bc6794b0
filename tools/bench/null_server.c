// An HTTP server that streams ready-made token events at known times, faster than any client reads them.
//
//   null_server TTFT_S ITL_S EVENTS_PER_WRITE        prints its port, serves until its standard input ends
//
// The first event of a request is due TTFT_S after its arrival, each later one ITL_S after the one before; only the
// second is late by up to ITL_S more, another share for each request, so that streams do not run in step. ITL_S = 0: as
// fast as the client reads. GET /stats: counters, and how late events were written. GET /arrivals: the time of each
// request on CLOCK_MONOTONIC. POST /reset forgets both.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FD = 65536, MAX_REQUESTS = 1 << 20, MAX_BURST = 64, LATE_US = 200000, OUT = 65536 };

typedef struct Stream {
  int fd, left, total, prompt, chat, ids, blocked, dead, streaming;
  double due, phase;
  char *in;
  size_t in_size, in_room;
  char *out;  // what the socket did not take
  size_t out_at, out_size;
} Stream;

static Stream *streams[MAX_FD];
static Stream *waiting[MAX_FD];  // a heap: the one that is due first stands first
static int n_waiting;
static double ttft_s, itl_s, arrivals[MAX_REQUESTS];
static int burst, epoll_fd, timer_fd, open_now, open_max;
static long requests, events, writes, late_us[LATE_US + 1];
static char event_text[2][2][2][1024];  // chat, ids, last
static int event_size[2][2][2];

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static int chunk(char *to, const char *body) { return sprintf(to, "%zx\r\n%s\r\n", strlen(body), body); }

static void prepare_events(void) {
  for (int chat = 0; chat < 2; chat++)
    for (int ids = 0; ids < 2; ids++)
      for (int last = 0; last < 2; last++) {
        char body[900], *token = ids ? ",\"token_ids\":[7]" : "";
        char *finish = last ? "\"length\"" : "null";
        if (chat)
          sprintf(body, "data: {\"id\":\"chatcmpl-9f1b6c2e8d7a4f03\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,"
                  "\"model\":\"kvlab-null\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},\"logprobs\":null,"
                  "\"finish_reason\":%s%s}]}\n\n", finish, token);
        else
          sprintf(body, "data: {\"id\":\"cmpl-9f1b6c2e8d7a4f03\",\"object\":\"text_completion\",\"created\":1760000000,"
                  "\"model\":\"kvlab-null\",\"choices\":[{\"index\":0,\"text\":\" word\",\"logprobs\":null,"
                  "\"finish_reason\":%s,\"stop_reason\":null%s}],\"usage\":null}\n\n", finish, token);
        event_size[chat][ids][last] = chunk(event_text[chat][ids][last], body);
      }
}

static void push(Stream *s) {
  int i = n_waiting++;
  for (; i && waiting[(i - 1) / 2]->due > s->due; i = (i - 1) / 2) waiting[i] = waiting[(i - 1) / 2];
  waiting[i] = s;
}

static Stream *pop(void) {
  Stream *first = waiting[0], *last = waiting[--n_waiting];
  int i = 0, k;
  for (; (k = 2 * i + 1) < n_waiting; i = k) {
    if (k + 1 < n_waiting && waiting[k + 1]->due < waiting[k]->due) k++;
    if (waiting[k]->due >= last->due) break;
    waiting[i] = waiting[k];
  }
  waiting[i] = last;
  return first;
}

static void watch(Stream *s, int out) {
  struct epoll_event e = {.events = EPOLLIN | (out ? EPOLLOUT : 0), .data.fd = s->fd};
  epoll_ctl(epoll_fd, EPOLL_CTL_MOD, s->fd, &e);
}

static void drop(Stream *s) {  // a stream in a queue is freed when its turn comes
  if (s->fd >= 0) {
    close(s->fd);
    streams[s->fd] = NULL;
    s->fd = -1;
    open_now--;
  }
  s->dead = 1;
  if (!s->streaming || s->blocked) { free(s->in); free(s->out); free(s); }
}

// True when all of it went out; else the rest is kept and the socket is watched.
static int put(Stream *s, const char *data, size_t size) {
  ssize_t n = send(s->fd, data, size, MSG_NOSIGNAL);
  writes++;
  if (n < 0 && errno != EAGAIN) { s->dead = 1; return 1; }
  if (n < 0) n = 0;
  if ((size_t)n == size) return 1;
  s->out = realloc(s->out, size - n);
  memcpy(s->out, data + n, size - n);
  s->out_at = 0, s->out_size = size - n, s->blocked = 1;
  watch(s, 1);
  return 0;
}

static void finish(Stream *s) {
  char body[512], text[700];
  const char *kind = s->chat ? "chat.completion.chunk" : "text_completion";
  sprintf(body, "data: {\"id\":\"cmpl-9f1b6c2e8d7a4f03\",\"object\":\"%s\",\"created\":1760000000,\"model\":\"kvlab-null\",\"choices\":[],"
          "\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d,\"prompt_tokens_details\":"
          "{\"cached_tokens\":0}}}\n\ndata: [DONE]\n\n", kind, s->prompt, s->prompt + s->total, s->total);
  int size = chunk(text, body);
  size += sprintf(text + size, "0\r\n\r\n");
  s->streaming = 0;
  put(s, text, size);
}

// Writes the event or events that are due, and queues the stream for its next ones.
static void serve(Stream *s, double t) {
  static char buffer[MAX_BURST * 1024];
  if (s->dead) { s->streaming = 0; drop(s); return; }
  int n = s->left < burst ? s->left : burst, size = 0;
  long late = (t - s->due) * 1e6;
  late_us[late < 0 ? 0 : late > LATE_US ? LATE_US : late]++;
  for (int i = 0; i < n; i++) {
    int last = --s->left == 0;
    memcpy(buffer + size, event_text[s->chat][s->ids][last], event_size[s->chat][s->ids][last]);
    size += event_size[s->chat][s->ids][last];
  }
  events += n;
  s->due = itl_s ? s->due + itl_s + s->phase : t;
  s->phase = 0;
  if (put(s, buffer, size)) {
    if (s->left) push(s); else finish(s);
  }
}

static int number_after(const char *text, const char *name) {
  char *at = strstr(text, name);
  if (!at) return -1;
  at += strcspn(at + strlen(name), "0123456789") + strlen(name);
  return atoi(at);
}

static int prompt_tokens(const char *body) {  // ids are counted; of a text, its words
  char *at = strstr(body, "\"prompt\"");
  if (!at) at = strstr(body, "\"content\"");
  if (!at) return 0;
  at = strchr(at, ':') + 1;
  while (*at == ' ') at++;
  char end = *at == '[' ? ']' : '"', mark = *at == '[' ? ',' : ' ';
  int n = 1;
  for (at++; *at && *at != end; at++) n += *at == mark;
  return n;
}

static void answer(Stream *s, const char *type, const char *body, size_t size) {
  char *text = malloc(size + 200);
  int head = sprintf(text, "HTTP/1.1 200 OK\r\ncontent-type: %s\r\nx-kvlab-fake: 1\r\ncontent-length: %zu\r\n\r\n", type, size);
  memcpy(text + head, body, size);
  put(s, text, head + size);
  free(text);
}

static double late_quantile(double q) {
  long all = 0, seen = 0, i = 0;
  for (long k = 0; k <= LATE_US; k++) all += late_us[k];
  for (; i <= LATE_US; i++)
    if ((seen += late_us[i]) >= q * all) break;
  return i * 1e-6;
}

static void stats(Stream *s) {
  char text[600];
  struct rusage u;
  getrusage(RUSAGE_SELF, &u);
  double cpu = u.ru_utime.tv_sec + u.ru_stime.tv_sec + (u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
  int n = sprintf(text, "{\"requests\":%ld,\"events\":%ld,\"writes\":%ld,\"open\":%d,\"open_max\":%d,\"cpu_s\":%.6f,"
                  "\"late_p50_s\":%.6f,\"late_p99_s\":%.6f,\"late_max_s\":%.6f}\n", requests, events, writes, open_now,
                  open_max, cpu, late_quantile(0.5), late_quantile(0.99), late_quantile(1));
  answer(s, "application/json", text, n);
}

static void list_arrivals(Stream *s) {
  char *text = malloc(requests * 24 + 1);
  size_t n = 0;
  for (long i = 0; i < requests && i < MAX_REQUESTS; i++) n += sprintf(text + n, "%.6f\n", arrivals[i]);
  answer(s, "text/plain", text, n);
  free(text);
}

static void start(Stream *s, const char *head, const char *body) {
  static const char HEAD[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-kvlab-fake: 1\r\n"
                             "transfer-encoding: chunked\r\n\r\n";
  double t = now();
  if (requests < MAX_REQUESTS) arrivals[requests] = t;
  requests++;
  s->chat = strstr(head, "/chat/") != NULL;
  s->ids = strstr(body, "\"return_token_ids\":true") || strstr(body, "\"return_token_ids\": true");
  int asked = number_after(body, "\"max_completion_tokens\"");
  s->left = s->total = asked > 0 ? asked : number_after(body, "\"max_tokens\"") > 0 ? number_after(body, "\"max_tokens\"") : 16;
  s->prompt = prompt_tokens(body);
  s->due = t + ttft_s, s->streaming = 1;
  s->phase = itl_s * (requests * 0.618034 - (long)(requests * 0.618034));
  if (put(s, HEAD, sizeof HEAD - 1)) push(s);
}

static void dispatch(Stream *s, char *head, char *body) {
  static const char MODELS[] = "{\"object\":\"list\",\"data\":[{\"id\":\"kvlab-null\",\"object\":\"model\",\"created\":1,\"owned_by\":\"null\"}]}";
  if (strncmp(head, "POST /v1/", 9) == 0) { start(s, head, body); return; }
  if (strncmp(head, "POST /reset", 11) == 0) { requests = events = writes = 0; open_max = open_now; memset(late_us, 0, sizeof late_us); }
  if (strncmp(head, "GET /stats", 10) == 0) stats(s);
  else if (strncmp(head, "GET /arrivals", 13) == 0) list_arrivals(s);
  else if (strncmp(head, "GET /v1/models", 14) == 0) answer(s, "application/json", MODELS, sizeof MODELS - 1);
  else answer(s, "text/plain", "", 0);
}

// Takes whole requests out of what has been read.
static void requests_in(Stream *s) {
  char *end;
  while (s->in_size && (end = memmem(s->in, s->in_size, "\r\n\r\n", 4))) {
    char *length = strcasestr(s->in, "\r\ncontent-length:");
    size_t head = end + 4 - s->in, body = length && length < end ? strtoul(length + 17, NULL, 10) : 0;
    if (s->in_size < head + body) return;
    char kept = s->in[head + body];
    s->in[head - 1] = 0, s->in[head + body] = 0;
    dispatch(s, s->in, s->in + head);
    s->in[head + body] = kept;
    s->in_size -= head + body;
    memmove(s->in, s->in + head + body, s->in_size);
    s->in[s->in_size] = 0;
  }
}

static void readable(Stream *s) {
  for (;;) {
    if (s->in_room < s->in_size + 8192) s->in = realloc(s->in, s->in_room = 2 * s->in_size + 16384);
    ssize_t n = recv(s->fd, s->in + s->in_size, s->in_room - s->in_size - 1, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) { drop(s); return; }
    s->in[s->in_size += n] = 0;
    requests_in(s);
  }
}

static void writable(Stream *s) {
  ssize_t n = send(s->fd, s->out + s->out_at, s->out_size - s->out_at, MSG_NOSIGNAL);
  if (n < 0) { if (errno != EAGAIN) drop(s); return; }
  s->out_at += n;
  if (s->out_at < s->out_size) return;
  s->blocked = 0;
  watch(s, 0);
  if (!s->streaming) return;
  if (!s->left) { finish(s); return; }
  push(s);
}

static void accept_all(int listener) {
  int fd;
  while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    if (fd >= MAX_FD) { close(fd); continue; }
    int yes = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    streams[fd] = calloc(1, sizeof(Stream));
    streams[fd]->fd = fd;
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &e);
    if (++open_now > open_max) open_max = open_now;
  }
}

static void serve_due(void) {
  double t = now();
  for (int n = 0; n < 512 && n_waiting && waiting[0]->due <= t; n++) {
    serve(pop(), t);
    t = now();
  }
}

int main(int argc, char **argv) {
  if (argc != 4) { fprintf(stderr, "null_server TTFT_S ITL_S EVENTS_PER_WRITE\n"); return 2; }
  ttft_s = atof(argv[1]), itl_s = atof(argv[2]), burst = atoi(argv[3]);
  if (burst < 1 || burst > MAX_BURST) { fprintf(stderr, "EVENTS_PER_WRITE is 1 to %d\n", MAX_BURST); return 2; }
  struct rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  prctl(PR_SET_TIMERSLACK, 1);
  prepare_events();
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof address;
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  if (bind(listener, (void *)&address, size) || listen(listener, 4096)) { perror("listen"); return 1; }
  getsockname(listener, (void *)&address, &size);
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  epoll_fd = epoll_create1(0), timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  int watched[] = {listener, timer_fd, 0};
  for (int i = 0; i < 3; i++) {
    struct epoll_event e = {.events = EPOLLIN, .data.fd = watched[i]};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, watched[i], &e);
  }
  for (;;) {
    double due = n_waiting ? waiting[0]->due : 1e18, t = now();
    if (due > t && due < 1e17) {
      struct itimerspec at = {.it_value = {(time_t)due, (long)((due - (time_t)due) * 1e9)}};
      timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &at, NULL);
    }
    struct epoll_event found[256];
    int n = epoll_wait(epoll_fd, found, 256, due <= t ? 0 : -1);
    for (int i = 0; i < n; i++) {
      int fd = found[i].data.fd;
      char waste[8];
      if (fd == listener) accept_all(listener);
      else if (fd == timer_fd) { if (read(timer_fd, waste, 8) < 0) continue; }
      else if (fd == 0) { if (read(0, waste, 8) <= 0) return 0; }
      else {
        if (streams[fd] && (found[i].events & EPOLLOUT)) writable(streams[fd]);
        if (streams[fd] && (found[i].events & ~EPOLLOUT)) readable(streams[fd]);
      }
    }
    serve_due();
  }
}
